"""`round.robust`: every method has every rule, or refuses it by name."""

import numpy as np
import pytest
from msgspec.structs import replace
from tests.coordinator.extensions.test_norm_bound import forged
from tests.helpers.every_method import SETTINGS
from tests.helpers.hostile_world import SPEC, World, stores_closed  # noqa: F401 - a fixture
from tests.helpers.nightly import of_methods

from fleetune.coordinator.combine.rules import RULES, check_rule, refusal
from fleetune.protocols.errors import SettingError
from fleetune.protocols.methods import REGISTRY, create

SCALED = forged(lambda values: 50 * values)


@pytest.fixture
def weights():
    return np.linspace(-1, 1, SPEC.size, dtype=np.float32)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("name", "options"), of_methods(SETTINGS))
def test_a_rule_acts_and_outlives_a_restart_or_is_refused_in_one_line(name, options, rule, weights, tmp_path):
    method = create(name, SPEC, options)
    if refusal(rule, method) is not None:
        with pytest.raises(SettingError, match=f'round.robust = "{rule}": {name} cannot have it') as problem:
            World(tmp_path, name, options, weights, robust=rule)
        assert "\n" not in str(problem.value)
        return
    whole = World(tmp_path / "a", name, options, weights, forge=SCALED, robust=rule, norm_bound=0.0).play()
    broken = World(tmp_path / "b", name, options, weights, forge=SCALED, robust=rule, norm_bound=0.0)
    broken.join()
    while len(broken.closed) < 2:
        broken.step()
    broken.step()
    broken.restart()
    while broken.finished is None:
        broken.step()
    assert broken.shared().tobytes() == whole.shared().tobytes()
    figures = [reply.step for record in whole.closed for reply in record.devices.values()]
    assert all((one is not None) == method.combines for one in figures)
    assert any(one.clipped for one in figures if one) == (rule == "clip")


class InTurn(World):
    """Devices reply in the order in which they received their tasks."""

    def step(self):
        first = next(iter(self.tasks), None)
        others = {name: task for name, task in self.tasks.items() if name != first}
        self.tasks = {name: task for name, task in self.tasks.items() if name == first}
        super().step()
        self.tasks = {**others, **self.tasks}

    def restart(self):
        order = list(self.tasks)
        super().restart()
        self.tasks = {name: self.tasks[name] for name in order}


@pytest.mark.parametrize("rule", ["clip", "median"])
def test_a_rule_acts_alike_in_semi_asynchronous_rounds_after_a_restart(rule, weights, tmp_path):
    def world(name):
        settings = {"robust": rule, "mode": "buffer", "buffer": 3, "participants": 4}
        return InTurn(tmp_path / name, "fedspu", {}, weights, rounds=6, **settings)

    whole, broken = world("a").play(), world("b")
    broken.join()
    while len(broken.closed) < 3:
        broken.step()
    broken.restart()
    while broken.finished is None:
        broken.step()
    assert broken.shared().tobytes() == whole.shared().tobytes()
    assert any(one.staleness for record in whole.closed for one in record.devices.values())


def test_a_run_goes_on_with_another_rule_that_its_method_can_have(weights, tmp_path):
    world = World(tmp_path, "fedspu", {}, weights, forge=SCALED, norm_bound=0.0)
    world.join()
    while len(world.closed) < 2:
        world.step()
    world.settings = replace(world.settings, round=replace(world.settings.round, robust="krum"))
    with pytest.raises(SettingError, match="fedspu cannot have it"):
        world.restart()
    world.settings = replace(world.settings, round=replace(world.settings.round, robust="clip"))
    world.restart()
    while world.finished is None:
        world.step()
    clipped = [one.step.clipped for record in world.closed[2:] for one in record.devices.values()]
    assert any(clipped)


@pytest.mark.parametrize("rule", [one for one in RULES if one != "none"])
def test_a_hostile_update_does_less_harm(rule, weights, tmp_path):
    def far(robust, forge):
        folder = tmp_path / f"{robust}-{forge is SCALED}"
        world = World(folder, "fedavg", {}, weights, forge=forge, robust=robust, norm_bound=0.0, rounds=6)
        return world.play().shared()

    honest = far("none", lambda reply: reply)
    harm = {one: float(np.abs(far(one, SCALED) - honest).max()) for one in ("none", rule)}
    assert harm[rule] < 0.2 * harm["none"]


def test_every_method_that_combines_has_clip_and_median():
    for name in REGISTRY:
        method = create(name, SPEC, {})
        can = {rule for rule in RULES if refusal(rule, method) is None}
        assert can >= ({"clip", "median", "trimmed-mean", "none"} if method.combines else {"none"})


def test_the_message_names_what_can_be_used(weights, tmp_path):
    with pytest.raises(SettingError, match=r'different entries.*use "clip" or "median" or "trimmed-mean"'):
        World(tmp_path / "a", "fedspu", {}, weights, robust="krum")
    with pytest.raises(SettingError, match='mixture of its own; use "none"'):
        World(tmp_path / "b", "kapc", {}, weights, robust="clip")
    settings = World(tmp_path / "c", "fedspu", {}, weights, robust="clip").settings
    check_rule(settings, create("fedspu", SPEC, {}))
