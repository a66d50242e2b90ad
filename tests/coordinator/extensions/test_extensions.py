"""The extension seam: its order, and what every extension holds to."""

import inspect
from types import SimpleNamespace

import numpy as np
import pytest
from tests.helpers.hostile_world import SPEC, World, stores_closed  # noqa: F401 - a fixture

from fleetune.coordinator.extensions.downsampling import Downsampling
from fleetune.coordinator.extensions.extension import Extension, Extensions, RoundUpdates
from fleetune.coordinator.extensions.max_share import MaxShare
from fleetune.coordinator.extensions.method_diagnostics import MethodDiagnostics
from fleetune.coordinator.extensions.norm_bound import NormBound
from fleetune.coordinator.extensions.order import ORDER
from fleetune.coordinator.extensions.privacy.private_steps import PrivateSteps
from fleetune.coordinator.extensions.proposed_work import ProposedWork
from fleetune.coordinator.extensions.quarantine import Quarantine
from fleetune.coordinator.extensions.releases import Releases
from fleetune.coordinator.extensions.reply_claims import ReplyClaims
from fleetune.coordinator.extensions.staleness import StalenessDiscount
from fleetune.coordinator.extensions.update_steps import UpdateSteps
from fleetune.coordinator.run.open_or_resume import open_run
from fleetune.protocols.settings.run_settings import RunSettings

HOOKS = ("recall", "admit", "check", "before_send", "record", "weigh", "after_round", "after_rollback")


def test_the_order():
    assert (
        ReplyClaims,
        NormBound,
        Releases,
        ProposedWork,
        StalenessDiscount,
        UpdateSteps,
        Quarantine,
        MaxShare,
        PrivateSteps,
        MethodDiagnostics,
        Downsampling,
    ) == ORDER


def test_claims_are_checked_first_shares_limited_after_other_weights_and_steps_bounded_last():
    weighing = [one for one in ORDER if one.weigh is not Extension.weigh]
    assert ORDER[0] is ReplyClaims
    assert weighing[-2:] == [MaxShare, PrivateSteps]


@pytest.mark.parametrize("kind", ORDER)
def test_every_extension_takes_what_the_seam_gives(kind):
    assert issubclass(kind, Extension)
    assert kind.__doc__
    assert "of_run" in vars(kind)
    for hook in HOOKS:
        due = [one.name for one in inspect.signature(getattr(Extension, hook)).parameters.values()]
        assert [*inspect.signature(getattr(kind, hook)).parameters] == due
    assert any(hook in vars(kind) for hook in HOOKS), "it does something"


def test_no_two_extensions_share_a_slot():
    slots = [slot for kind in ORDER for slot in kind.slots]
    assert len(slots) == len(set(slots))


@pytest.mark.parametrize("kind", ORDER)
def test_no_extension_keeps_the_whole_settings(kind, tmp_path):
    world = World(tmp_path, "fedavg", {}, np.zeros(SPEC.size, np.float32))
    context = SimpleNamespace(
        settings=world.settings,
        learns=world.enrolment.learns,
        method=world.run.method,
        store=world.run.store,
        state=world.state,
        norms=None,
        combine=None,
    )
    extension = kind.of_run(context)
    if extension is not None:
        assert not any(isinstance(value, RunSettings) for value in vars(extension).values())


class Times(Extension):
    """Notes when it is called."""

    def __init__(self, name, calls):
        self.name, self.calls = name, calls

    def weigh(self, updates, round_):
        for one in updates:
            self.calls.append((self.name, one.device))
            yield one


def test_updates_pass_through_all_extensions_one_by_one_in_order():
    calls = []

    def read(device):
        calls.append(("read", device))
        return SimpleNamespace(device=device, update=device)

    chain = Extensions((Times("first", calls), Times("second", calls)))
    assert list(chain.updates(RoundUpdates(1, ("a", "b"), None, {}, read))) == [("a", "a"), ("b", "b")]
    assert calls == [(who, device) for device in "ab" for who in ("read", "first", "second")]


def test_a_run_that_is_opened_again_recalls_its_extensions(tmp_path, monkeypatch):
    world = World(tmp_path, "fedavg", {}, np.zeros(SPEC.size, np.float32))
    world.join()
    recalled = []

    def recall(extension):
        recalled.append(extension)

    monkeypatch.setattr(NormBound, "recall", recall)
    world.run.store.close()
    world.run = open_run(world.settings, tmp_path, durable=False)
    world.controller.resume(0.0)
    assert len(recalled) == 1
