"""A fault that nobody foresaw, brought about by what a peer sent, costs that peer its message and nobody else
anything: it is counted and logged, nothing is half done, and the loop goes on.
"""

import logging
from contextlib import ExitStack

import msgspec
import pytest
from tests.helpers.talk import AgentTalk, Coordinating, answered, run_settings

from fleetune.coordinator.rounds.records import Ledger
from fleetune.coordinator.run.open_or_resume import open_run
from fleetune.protocols.errors import StoreError
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.wire import messages as wire
from fleetune.protocols.wire.messages import TransferKey

DEVICES = ("a", "b")


@pytest.fixture
def begun():
    """Begins runs of two devices, both of which have been asked in round 1."""
    with ExitStack() as open_runs:

        def begin(folder, **settings):
            talk = Coordinating.of(folder, run_settings(start_with=2, **settings))
            open_runs.callback(talk.close)
            return _greeted(talk)

        yield begin


def _greeted(talk):
    for device in DEVICES:
        talk.greet(device, num_samples=10)
    return talk, {device: talk.session(device) for device in DEVICES}


def play(talk, sessions, device):
    """The device's part in the round that is open; what became of its reply."""
    turn = talk.run.controller.engine_state.round_attempt
    final_evaluation = talk.run.controller.engine_state.stage == "evaluating"
    reply = answered(sessions[device], talk.task(device))
    return talk.send(device, TransferKey("update", talk.id, *turn, final_evaluation), reply)


def remembered(controller):
    """All that a step may change."""
    ledger = msgspec.json.decode(msgspec.json.encode(controller.ledger), type=Ledger)
    ledger.refusals = {}
    state = controller.engine_state
    return (
        state.round_attempt,
        state.stage,
        state.replied,
        sorted(state.members),
        ledger.traffic,
        controller.method_state.weights.tobytes(),
    )


def finished(talk, sessions):
    while talk.run.controller.finished is None:
        for device in DEVICES:
            play(talk, sessions, device)
    return talk.run.controller.method_state.weights.tobytes()


class Broken:
    """A step that fails when it is told to, and otherwise does what it did before."""

    def __init__(self, monkeypatch, kind, name):
        self.armed, step = False, getattr(kind, name)

        def flaky(*arguments):
            if self.armed:
                raise ZeroDivisionError("a sum of nothing")
            return step(*arguments)

        monkeypatch.setattr(kind, name, flaky)


@pytest.mark.parametrize("step", ["aggregate", "plan"])
@pytest.mark.parametrize("mode", ["synchronous", "buffer"])
def test_a_fault_in_mid_step_is_told_counted_and_logged_and_the_run_goes_on(
    begun, tmp_path, monkeypatch, caplog, step, mode
):
    changes = {"mode": mode, "buffer": 2} if mode == "buffer" else {}
    talk, sessions = begun(tmp_path, **changes)
    broken = Broken(monkeypatch, type(talk.run.method), step)
    assert play(talk, sessions, "a").refused is None
    broken.armed = True
    with caplog.at_level(logging.DEBUG):
        monkeypatch.setattr(talk.run.controller, "_go_back", _disarmed(talk.run.controller, broken))
        refused = play(talk, sessions, "b").refused
    assert "unexpected ZeroDivisionError" in refused
    lines = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.getMessage() for record in lines] == [
        "b: unexpected ZeroDivisionError (a sum of nothing); what it sent is refused"
    ]
    assert lines[0].exc_info is None  # its traceback is in the debug log
    assert any(record.exc_info for record in caplog.records)
    assert talk.run.controller.ledger.refusals["ZeroDivisionError"] == 1
    finished(talk, sessions)


def _disarmed(controller, broken):
    """Going back plans the round again, on what worked before."""
    go_back = controller._go_back

    def go():
        broken.armed = False
        go_back()

    return go


def test_a_run_goes_on_in_the_next_process_as_if_nothing_had_happened(begun, tmp_path, monkeypatch):
    calm = finished(*begun(tmp_path / "calm"))
    talk, sessions = begun(tmp_path / "shaken")
    broken = Broken(monkeypatch, type(talk.run.method), "aggregate")
    play(talk, sessions, "a")
    controller = talk.run.controller
    reply = answered(sessions["b"], talk.task("b"))
    before, broken.armed = remembered(controller), True
    with pytest.raises(ZeroDivisionError):
        controller.receive("b", controller.round_attempt, reply, wire.RoundCost(), 0.0)
    assert remembered(controller) == before
    broken.armed = False
    talk.run.store.close()
    again = open_run(talk.run.settings, talk.run.folder, durable=False)
    again.controller.resume(0.0)
    assert remembered(again.controller)[2:] == before[2:]
    again.store.close()
    talk, again_sessions = begun(tmp_path / "third")
    assert finished(talk, again_sessions) == calm


def test_the_step_that_failed_can_be_taken_again(begun, tmp_path, monkeypatch):
    calm = finished(*begun(tmp_path / "calm"))
    talk, sessions = begun(tmp_path / "shaken")
    broken = Broken(monkeypatch, type(talk.run.method), "aggregate")
    controller = talk.run.controller
    play(talk, sessions, "a")
    reply = answered(sessions["b"], talk.task("b"))
    broken.armed = True
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            controller.receive("b", controller.round_attempt, reply, wire.RoundCost(), 0.0)
    broken.armed = False
    talk.server.parts.exchange.carry_out(
        controller.receive("b", controller.round_attempt, reply, wire.RoundCost(), 0.0)
    )
    assert finished(talk, sessions) == calm


def test_a_fault_of_the_disk_still_ends_the_coordinator(begun, tmp_path, monkeypatch):
    talk, _ = begun(tmp_path)

    def full(*_):
        raise StoreError("no room")

    monkeypatch.setattr(talk.run.store, "put", full)
    with pytest.raises(StoreError, match="no room"):
        talk.hear("a", wire.Presence(False, "x"), "state")


def test_a_number_beyond_every_column_is_refused_and_the_loop_goes_on(begun, tmp_path):
    talk, sessions = begun(tmp_path)
    measured = wire.encode(wire.Measured(talk.id, 1, 1, wire.RoundCost()))
    for digits in (2**31, 2**63, 2**70):
        talk.hear("a", measured.replace(b'"round":1', b'"round":%d' % digits))
    assert talk.run.controller.ledger.refusals == {"PacketCorrupt": 3}
    finished(talk, sessions)


def test_an_agent_too_blames_what_came_and_goes_on(tmp_path, monkeypatch, caplog):
    talk = AgentTalk(tmp_path)

    def fail(_):
        raise KeyError("nobody thought of this")

    with monkeypatch.context() as patched, caplog.at_level(logging.DEBUG):
        patched.setattr(talk.agent._intake, "handle_offer", fail)
        assert talk.send(TransferKey("enrolment", "run-1"), b"anything") is None
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert line == "what came on 'down' is refused: unexpected KeyError ('nobody thought of this')"
    assert any(record.exc_info for record in caplog.records if record.levelno == logging.DEBUG)
    assert talk.send(TransferKey("enrolment", "run-1"), b"anything").refused is None
    talk.close()


def test_a_device_that_thinks_the_run_is_over_is_enrolled_again_and_counts_only_then(tmp_path, begun):
    talk, sessions = begun(tmp_path)
    talk.hear("a", wire.Left(talk.id))
    assert not talk.run.controller.engine_state.members["a"].ready
    talk.hear("a", wire.Ready(talk.id, talk.run.enrolment.spec.hash, DeviceReport("a", num_samples=10)))
    assert talk.run.controller.ledger.refusals == {"PacketForeign": 1}
    assert not talk.run.controller.engine_state.members["a"].ready
    talk.greet("a", num_samples=10)
    assert talk.run.controller.engine_state.members["a"].ready
    finished(talk, sessions)
