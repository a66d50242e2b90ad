"""Replies whose values an encoding wrote: against the right base only, the same whatever is killed when."""

import shutil

import pytest
from tests.conftest import tiny_spec
from tests.helpers.nightly import sooner
from tests.helpers.played_run import MODES, PlayedRun

from fleetune.coordinator.run.run_events import ReplyRefused
from fleetune.protocols.method.choice import Budget
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.update import codec, encodings
from fleetune.protocols.update.reference_model import ReferenceModel
from fleetune.protocols.wire.payloads import Assignment, Reply

NAMES = [name for name in encodings.REGISTRY if name != encodings.RAW]
SPEC = tiny_spec()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("down", sooner(["raw", "as up"], kept=["as up"]))
@pytest.mark.parametrize("name", sooner(NAMES, kept=("int8", "sketch")))
def test_kills_of_both_sides_change_no_bit(tmp_path, name, down, mode):
    if down == "as up" and encodings.find(name).on_average:
        pytest.skip("it is not for tasks")
    ways = name, name if down == "as up" else down
    whole = PlayedRun(tmp_path / "whole", "fedavg", mode, *ways)
    whole.play()
    wanted = whole.end()
    whole.close()
    for stopped in (3, 5, 8):
        folder = tmp_path / f"stopped-{stopped}"
        first = PlayedRun(folder, "fedavg", mode, *ways)
        first.play(end=stopped)
        first.close()
        shutil.copytree(folder, tmp_path / f"copy-{stopped}")
        rest = PlayedRun(tmp_path / f"copy-{stopped}", "fedavg", mode, *ways)
        rest.play(begin=stopped)
        found = rest.end()
        rest.close()
        assert (found["shared"], found["personal"]) == (wanted["shared"], wanted["personal"])


def test_an_update_written_with_another_base_is_refused_and_costs_nobody_else(tmp_path):
    played = PlayedRun(tmp_path, "fedavg", "synchronous", "int8")
    played.play(end=0)
    device, (turn, task) = next(iter(played.tasks.items()))
    assignment = codec.decode(task, Assignment[played.run.method.task_type], SPEC)
    data = played.sessions[device].reply(task, Budget(1.0))
    base = ReferenceModel.of_task(assignment.task, SPEC)
    kind = Reply[played.run.method.update_type]
    reply = codec.decode(data, kind, SPEC, reference=base)
    assert reply.base == base.digest
    other = ReferenceModel(base.values + 1, base.held)
    forged = codec.encode(
        Reply(device, *turn, False, reply.measures, reply.update, other.digest), played.run.method.spec
    )
    outcomes = played.run.controller.receive(device, turn, forged, RoundCost(), 1.0)
    refused = [one for one in outcomes if isinstance(one, ReplyRefused)]
    assert "another reference" in str(refused[0].problem)
    played.close()


@pytest.mark.parametrize("down", ["raw", "lossless", "int8"])
def test_a_task_that_nobody_heard_to_be_delivered_counts_as_it_was_sent(tmp_path, monkeypatch, down):
    """A coordinator that is stopped in between loses the word of it; whoever replies has had its task."""

    def records(folder, *, deaf):
        run = PlayedRun(folder, "fedspu", "synchronous", down=down)
        if deaf:
            monkeypatch.setattr(run.run.controller, "note_delivered", lambda *_: None)
        run.play()
        found = run.end()["records"]
        run.close()
        return found

    assert records(tmp_path / "deaf", deaf=True) == records(tmp_path / "heard", deaf=False)
