"""What is small on the wire stays small in memory: every attack that we can think of, each measured."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import zstandard
from tests import hostile
from tests.helpers.places import ROOT

from fleetune.edge_agent.probes.link_speed import ProbeConnection
from fleetune.edge_agent.probes.memory import process_memory
from fleetune.edge_agent.run.intake import Intake
from fleetune.edge_agent.run.joining import _enrolment
from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.protocols import errors
from fleetune.protocols.conditions import Conditions
from fleetune.protocols.errors import ModelError, PacketCorrupt, PacketError, PacketTooLarge, TransportError
from fleetune.protocols.update import codec
from fleetune.protocols.update.body import Body
from fleetune.protocols.update.elements import without_arrays
from fleetune.protocols.wire.messages import Offer, Refuse, TransferKey
from fleetune.protocols.wire.transfer import transfer_id
from fleetune.protocols.wire.transport import Disconnected, Received

MOST_BYTES = 50_000_000
MOST_SECONDS = 20.0  # a mere bound on what never ends: none takes a second


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux resets a peak")
def test_no_packet_takes_much_more_memory_than_an_honest_one():
    command = [sys.executable, "-m", "tests.hostile"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    found = json.loads(done.stdout)
    assert len(found) > 40
    wrong = {
        name: one
        for name, one in found.items()
        if one["peak"] > MOST_BYTES + 8 * one["honest"]
        or one["seconds"] > MOST_SECONDS
        or not (name.endswith("as there may be") or _is_refused(one["problem"]))
    }
    assert not wrong


def _is_refused(problem):
    return issubclass(getattr(errors, problem, object), PacketError)


def test_honest_packets_are_read():
    hostile.read_reply(hostile.honest_reply())
    hostile.read_task(hostile.honest_task())


def unpacking(body):
    return Body(memoryview(zstandard.ZstdCompressor().compress(body)), len(body))


def nothing(head, body):
    return None


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"", PacketCorrupt),
        (b"\x92\x01", PacketCorrupt),
        (b"\x01\x02", PacketCorrupt),
        (b"\xdd\xff\xff\xff\xff", PacketCorrupt),
        (b"\xdf\x80\x00\x00\x00\x01", PacketCorrupt),
        (b"\xc6\xff\xff\xff\xff", PacketCorrupt),
        (b"\x91" * 33 + b"\x01", PacketTooLarge),
        (b"\xdc\x00\x0b" + b"\x01" * 11, PacketTooLarge),
    ],
)
def test_elements_are_counted_before_they_are_made(body, problem):
    with pytest.raises(problem):
        without_arrays(unpacking(body), nothing, most=10)


@pytest.mark.parametrize(
    "value",
    [None, True, 0, -1, -33, 2**7, 2**15, 2**31, 2**63, 1.5, "", "x" * 31, "x" * 255, "x" * 2**16, b"",
     b"x" * 300, b"x" * 2**16, [], [1] * 15, [[]] * 16, [1] * 2**16, {}, {n: n for n in range(16)},
     {n: [n] for n in range(2**16)}],
    ids=lambda value: f"{type(value).__name__} {len(value) if hasattr(value, '__len__') else value}",
)  # fmt: skip
def test_whatever_is_well_formed_passes(value):
    body = msgspec.msgpack.encode(value)
    assert without_arrays(unpacking(body), nothing, most=10**6) == (body, [])


def test_a_board_declines_a_model_that_its_memory_cannot_hold():
    data = codec.encode(hostile.enrolment(), hostile.SPEC)
    assert _enrolment(data, "run-1", Conditions()).run == "run-1"
    with pytest.raises(ModelError, match="the run's model takes 0 MB to unpack; this process holds"):
        _enrolment(data, "run-1", Conditions(memory_bytes=process_memory().resident))


def test_an_agent_refuses_what_its_memory_or_disk_cannot_take(tmp_path, monkeypatch):
    store = AgentStore(tmp_path)
    intake = Intake(
        "a",
        store,
        joined=lambda: None,
        reason_not_to_train=lambda: None,
        clock=lambda: 0.0,
        memory=lambda: 100_000_000,
    )
    transfer_key = TransferKey("enrolment", "run-1")

    def offered(num_bytes):
        digest = f"{num_bytes:032x}"
        answer = intake.handle_offer(
            Offer(transfer_id(transfer_key, "a", digest), digest, num_bytes, transfer_key)
        )
        return answer.reason if isinstance(answer, Refuse) else None

    assert offered(40_000_000) is None
    assert "may take 100 MB of memory" in offered(60_000_000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Disk", (), {"free": 50_000_000}))
    assert "has 50 MB of disk left" in offered(40_000_000)
    assert offered(1_000_000) is None


def test_a_probe_that_is_talked_to_without_end_gives_up():
    """Whoever may write to a device's probe topic could keep it waiting for ever."""

    class Flood:
        def get(self, timeout):
            return Received("fleetune/v1/f/a/probe", b"not what was asked for")

    line, ticks = ProbeConnection.__new__(ProbeConnection), iter(range(1000))
    line._arrivals, line._clock = Flood(), lambda: float(next(ticks))
    with pytest.raises(TransportError, match="does not answer within 5 s"):
        line._wait(lambda event: isinstance(event, Disconnected), 5.0, "it does not answer")
