"""The most memory that a round takes on an agent and at the coordinator, for each parameter of the model.

Only allocations count, which other load on the machine does not change.
"""

from contextlib import closing

import numpy as np
import pytest
from benchmarks.round_memory import Fleet, Traced
from tests.helpers.linear_bundle import bundle

from fleetune.coordinator.run import aggregation
from fleetune.coordinator.store import method_state, run_store
from fleetune.edge_agent.training import onnx_backend
from fleetune.protocols.method.choice import Budget

BUNDLE = bundle(500_000)
MODEL = 4 * BUNDLE.spec.size  # bytes; 1.5 million parameters
DEVICES = ("a", "b")
# Limits, in models. Beyond what is at rest, an agent takes the task's model, the one in training and the
# gradient; samples and batches take 1.1. The coordinator takes sums in float64, and one update.
AGENT, COORDINATOR = 4.6, 4.1
# At rest: each agent's personal and shared model, the coordinator's state, the model before it, the initial
# model, and encoded tasks.
HELD = 10.0


@pytest.mark.parametrize("encoding", ["lossless", "raw"])
def test_rounds_take_little_more_than_the_models_that_they_work_on(encoding, tmp_path):
    with Traced() as traced, closing(Fleet(BUNDLE, tmp_path, encoding=encoding, devices=DEVICES)) as fleet:
        for _ in range(2):
            for device in DEVICES:
                (attempt, reply), agent = traced.peak_of(fleet.reply, device)
                assert fleet.closed or len(reply) > 0.5 * MODEL, "most entries have changed"
                _, coordinator = traced.peak_of(fleet.receive, device, attempt, reply)
                del reply
                assert agent <= AGENT * MODEL
                assert coordinator <= COORDINATOR * MODEL
        assert fleet.closed == 2
        assert traced.held <= HELD * MODEL


def played(folder):
    """All replies of two rounds of a model of 1.2 MB, and the models at their end."""
    found = []
    with closing(Fleet(bundle(100_000), folder, devices=DEVICES)) as fleet:
        for device in DEVICES * 2:
            attempt, reply = fleet.reply(device)
            fleet.receive(device, attempt, reply)
            found.append(reply)
        models = [fleet.run.controller.shared_model, *(one.personal_model for one in fleet.sessions.values())]
    return found, [model.tobytes() for model in models]


def test_what_saves_memory_for_large_models_changes_no_bit(tmp_path, monkeypatch):
    large = played(tmp_path / "large")
    for module in (onnx_backend, aggregation, method_state, run_store):
        monkeypatch.setattr(module, "LARGE_BYTES", 2**40)
    assert played(tmp_path / "small") == large


def test_a_failed_round_changes_nothing(tmp_path):
    with closing(Fleet(BUNDLE, tmp_path, devices=DEVICES)) as fleet:
        session, task = fleet.sessions["a"], fleet.tasks["a"][1]
        before, base = session.personal_model.copy(), session.base
        local, session._local = session._local, None
        with pytest.raises(AttributeError):
            session.reply(task, Budget(1.0))
        assert (session.base, session.last_round) == (base, 0)
        assert np.array_equal(session.personal_model, before)
        session._local = local
        assert session.reply(task, Budget(1.0)) == session.reply(task, Budget(1.0))
