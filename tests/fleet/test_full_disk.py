"""A device whose disk is full: it says so at once, stays, and is back when there is room."""

import resource

import pytest
from tests.helpers.fleet_processes import Fleet, run_toml, wait_until

from fleetune.edge_agent.run.intake import AGAIN_S, Intake
from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.edge_agent.state.state_folder import MARKER
from fleetune.protocols import disk
from fleetune.protocols.wire.inbox import Arrived
from fleetune.protocols.wire.messages import Ack, Offer, Refuse, Resume, TransferKey
from fleetune.protocols.wire.transfer import Chunk, digest_of, transfer_id

PAYLOAD = bytes(range(256)) * 40
TRANSFER_KEYS = {kind: TransferKey(kind, "r", 3, 1) for kind in ("enrolment", "bundle", "task")}
LARGE = {
    "source": "tests.helpers.fleet_processes:images",
    "shape": "[1, 28, 28]",
    "method": "fedavg",
    "rounds": 5,
}
LITTLE_BYTES = 60_000  # more than the agent's log takes here, less than a task


class SmallDisk(disk.Disk):
    """Room for so many bytes more; removing a file gives none back."""

    room = 0

    def write(self, path, data, mode=disk.PRIVATE):
        super().write(path, b"", mode)
        self._take(super().append, path, data)

    def append(self, path, data):
        self._take(super().append, path, data)

    def _take(self, write, path, data):
        write(path, data[: self.room])
        self.room -= len(data)
        if self.room < 0:
            self.room = 0
            raise OSError(28, "No space left on device")


def offer_of(transfer_key):
    digest = digest_of(PAYLOAD)
    return Offer(transfer_id(transfer_key, "d", digest), digest, len(PAYLOAD), transfer_key)


@pytest.fixture
def device(tmp_path, monkeypatch):
    store, now = AgentStore(tmp_path / "state"), [0.0]
    store.enrolment("r").write(b"enrolment")
    intake = Intake("d", store, joined=lambda: "r", reason_not_to_train=lambda: None, clock=lambda: now[0])
    small = SmallDisk()
    monkeypatch.setattr(disk, "DISK", small)
    return intake, small, store


def receive(intake, transfer_key):
    """All of a payload, in two chunks; the last answer."""
    offer = offer_of(transfer_key)
    outcome = intake.handle_offer(offer)
    for offset in (0, len(PAYLOAD) // 2):
        if isinstance(outcome, Refuse):
            break
        data = PAYLOAD[offset : offset + len(PAYLOAD) // 2]
        outcome = intake.handle_chunk(Chunk(offer.transfer, offset, data).encode(), 0.0)
    if isinstance(outcome, Arrived):
        return intake.keep(outcome) or intake.accept(outcome)
    return outcome


@pytest.mark.parametrize("kind", TRANSFER_KEYS)
@pytest.mark.parametrize("room", [0, 10, 6000, len(PAYLOAD), len(PAYLOAD) + 10])
def test_what_cannot_be_stored_is_refused_with_the_reason_and_taken_when_there_is_room(device, kind, room):
    intake, small, store = device
    small.room = room
    refusal = receive(intake, TRANSFER_KEYS[kind])
    assert isinstance(refusal, Refuse)
    assert "No space left on device" in refusal.reason
    assert intake.again_at == AGAIN_S
    assert not list(store.incoming.glob("*"))  # it makes room
    small.room = 10**6
    offer = offer_of(TRANSFER_KEYS[kind])
    assert intake.handle_offer(offer) == Resume(offer.transfer, 0)
    assert receive(intake, TRANSFER_KEYS[kind]) == Ack(offer.transfer, len(PAYLOAD))
    assert intake.handle_offer(offer) == Ack(offer.transfer, len(PAYLOAD))


def test_an_agent_starts_on_a_full_disk_and_marks_its_folder_later(tmp_path, monkeypatch):
    (tmp_path / "pi").mkdir()
    monkeypatch.setattr(disk, "DISK", SmallDisk())
    AgentStore(tmp_path / "pi").claim().close()
    assert not (tmp_path / "pi" / MARKER).exists()
    monkeypatch.setattr(disk, "DISK", disk.Disk())
    AgentStore(tmp_path / "pi").claim().close()
    assert (tmp_path / "pi" / MARKER).exists()


@pytest.mark.nightly
@pytest.mark.fleet
def test_a_round_closes_at_once_without_a_device_that_has_no_room(tmp_path):
    with Fleet(tmp_path, run_toml(**LARGE, epochs=20)) as fleet:  # deadline_s = 600
        fleet.start()
        agent = fleet.agents["device-1"]
        agent.wait_for("round 1: training")
        limit_files(agent, LITTLE_BYTES)
        fleet.coordinator.wait_for("device-1 declines round 1: .*cannot write")
        fleet.coordinator.wait_for("device-1 declines round 2: .*cannot write .*part")
        fleet.coordinator.wait_for("round 2/5")
        limit_files(agent, resource.RLIM_INFINITY)
        fleet.wait_finished()
        first, second, *_, last, _ = (tuple(record[3]) for record in fleet.outcome().rounds)
    assert first == second == ("device-0", "device-2")
    assert last == ("device-0", "device-1", "device-2")


def limit_files(agent, num_bytes):
    """No file of this process may grow beyond that: as on a full disk, but without a disk of its own."""
    assert num_bytes == resource.RLIM_INFINITY or agent.log.stat().st_size < num_bytes / 2
    _, most = resource.prlimit(agent.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(agent.pid, resource.RLIMIT_FSIZE, (num_bytes, most))
    wait_until(lambda: resource.prlimit(agent.pid, resource.RLIMIT_FSIZE)[0] == num_bytes, "the limit holds")
