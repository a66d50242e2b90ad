"""How much an update changed what its device was sent: of what both hold, over its share of the work."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from tests.conftest import tiny_spec
from tests.coordinator.rounds.policies.test_utility_selection import member
from tests.tools.simulator.test_simulate_budgets import play

from fleetune.coordinator.run.replies import ArrivingReply, rms_change
from fleetune.coordinator.run.stored_run import look_at
from fleetune.protocols.method.averaging import Update
from fleetune.protocols.method.choice import Budget
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.reference_model import ReferenceModel
from fleetune.protocols.update.selection import Entries, Everything
from fleetune.protocols.wire.payloads import Measures, Reply

SPEC = tiny_spec()
START = np.random.default_rng(1).normal(size=SPEC.size).astype(np.float32)
EVERYTHING = Everything()


def update_of(values, selection=EVERYTHING):
    return Update(Patch.of(values, selection, SPEC), 10)


def test_it_is_the_root_of_the_mean_square_of_what_is_sent():
    brought = ReferenceModel.whole(START)
    assert rms_change(update_of(START), brought, SPEC) == 0
    assert rms_change(update_of(START + 0.5), brought, SPEC) == pytest.approx(0.5, rel=1e-5)
    end = START.copy()
    end[0] += 2
    sent = Entries(np.arange(SPEC.num_parameters) < 4)
    assert rms_change(update_of(end, sent), brought, SPEC) == pytest.approx(1.0, rel=1e-5)


def test_what_its_task_did_not_bring_tells_nothing():
    assert rms_change(update_of(START), ReferenceModel.nothing(SPEC), SPEC) is None
    half = ReferenceModel(START, EVERYTHING.mask(SPEC) & (np.arange(SPEC.size) % 2 == 0))
    end = np.where(half.held, START + 0.25, START + 99).astype(np.float32)
    assert rms_change(update_of(end), half, SPEC) == pytest.approx(0.25, rel=1e-5)


def test_who_trained_for_longer_changes_no_more_for_it():
    known = SimpleNamespace(reference=ReferenceModel.whole(START))

    def made(local_work, update, delivered=known):
        reply = Reply("a", 1, 1, False, Measures(10, 0, local_work=local_work), update)
        arriving = ArrivingReply(reply, b"", delivered, RoundCost(), RoundCost(), 0)
        return arriving.change(replace(member("a"), assigned=Budget(1.0, local_work)), SPEC)

    assert made(1.0, update_of(START + 0.5)) == pytest.approx(0.5, rel=1e-5)
    assert made(4.0, update_of(START + 2)) == pytest.approx(0.5, rel=1e-5)
    assert made(1.0, None) is None
    assert made(1.0, update_of(START), None) is None


@pytest.mark.parametrize("encoding", ["raw", "lossless"])
def test_a_run_draws_by_it(tmp_path, encoding):
    round_ = {"participants": 2, "prefer": "pyramid"}
    summary, records = play(tmp_path, round=round_, encoding={"up": encoding})
    with look_at(tmp_path / "a") as run:
        members = run.controller.engine_state.members
    asked = {name for record in records if not record.final_evaluation for name in record.participants}
    assert asked == set(members), "nobody is left out"
    assert all(members[name].observed.change > 0 for name in asked)
    assert summary.rounds == len([record for record in records if not record.final_evaluation])
