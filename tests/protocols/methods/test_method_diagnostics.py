"""What methods tell of their inner workings: all that is declared is seen, and nothing else."""

import math
from dataclasses import fields

import pytest
from tests.helpers.every_method import SETTINGS
from tests.protocols.methods.test_method_contract import DEVICES, SPEC, Run

from fleetune.protocols.method.diagnostics import MAX_DIAGNOSTICS, MOST_PARTS, declared_diagnostics
from fleetune.protocols.methods import REGISTRY, create

ROUNDS = 12


class Watched(Run):
    """A run whose method is asked what is seen, of every update and round."""

    def __init__(self, *args):
        super().__init__(*args)
        self.seen = []
        method, told = type(self.method), self.seen

        class Listening(method):
            def aggregate(self, state, updates, *combine):
                taken = list(updates)
                told.extend(("update", self.diagnose_update(update)) for _, update in taken)
                state = super().aggregate(state, iter(taken), *combine)
                told.append(("round", self.diagnose_round(state)))
                return state

        names = [one.name for one in fields(self.method)]
        self.method = Listening(**{name: getattr(self.method, name) for name in names})


def telling(name):
    return declared_diagnostics(create(name, SPEC, {}))


METHODS = [name for name in REGISTRY if telling(name)]


@pytest.mark.parametrize("name", REGISTRY)
def test_declarations_are_in_order(name):
    diagnostics = create(name, SPEC, {}).diagnostics
    assert declared_diagnostics(create(name, SPEC, {})) == diagnostics
    assert len(diagnostics) <= MAX_DIAGNOSTICS
    for one in diagnostics:
        assert one.title == one.title.strip() != ""
        assert one.about == one.about.strip() != ""
        assert one.unit in ("share", "count", "number")
        assert one.of in ("update", "round")


@pytest.mark.parametrize("name", METHODS)
def test_all_that_is_declared_is_seen_and_nothing_else(name, weights):
    declared = {(one.of, one.name): one for one in telling(name)}
    never = set(declared)
    for settings in [settings for method, settings in SETTINGS if method == name]:
        run = Watched(name, settings, weights)
        for number in range(1, ROUNDS + 1):
            run.round(number, replying=DEVICES[: 2 + number % 3])
        for of, told in run.seen:
            for figure, value in told.items():
                check(declared[of, figure], value)
                never.discard((of, figure))
    assert never == set()


def check(diagnostic, value):
    """Raises AssertionError: it is not what is declared."""
    assert (diagnostic.by is not None) == hasattr(value, "items"), diagnostic
    values = list(value.values()) if diagnostic.by else [value]
    assert len(values) <= MOST_PARTS
    assert all(math.isfinite(one) for one in values), diagnostic
    if diagnostic.unit == "share":
        assert all(-1e-6 <= one <= 1 + 1e-6 for one in values), (diagnostic, values)
    if diagnostic.unit == "count":
        assert all(one >= 0 for one in values), (diagnostic, values)
