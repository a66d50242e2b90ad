"""What arrives at a coordinator has room on its disk before it is taken, and leaves none behind."""

import os
import shutil
from typing import NamedTuple

import pytest
from tests.helpers.talk import Coordinating, answered, run_settings

import fleetune.protocols.wire.messages as wire
from fleetune.coordinator.serving import disk_space
from fleetune.coordinator.serving.disk_space import RESERVE_BYTES, remove_old_parts
from fleetune.coordinator.store.run_folder import INCOMING
from fleetune.protocols.wire.messages import Offer, Refuse, Resume, TransferKey
from fleetune.protocols.wire.transfer import Chunk, digest_of, transfer_id


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture
def talk(tmp_path, monkeypatch):
    """A run whose two devices have their task; `talk.free` bytes are left on the disk."""
    talk = Coordinating.of(tmp_path, run_settings(start_with=2))
    talk.free = 10 * RESERVE_BYTES
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(100 * RESERVE_BYTES, 0, talk.free))
    monkeypatch.setattr(disk_space, "SMALL_BYTES", 0)
    for device in ("a", "b"):
        talk.greet(device, num_samples=10)
    talk.tasks = {device: talk.task(device) for device in ("a", "b")}
    del talk.said[:]
    yield talk
    talk.close()


def offer(talk, device, payload):
    transfer_key = TransferKey("update", talk.id, 1, 1)
    digest = digest_of(payload)
    return Offer(transfer_id(transfer_key, device, digest), digest, len(payload), transfer_key)


def answers(talk, device):
    said = [wire.read_to_device(data) for topic, data in talk.take(device) if topic.endswith("/down")]
    return [one for one in said if isinstance(one, Resume | Refuse)]


def test_an_update_without_room_is_declined_by_name_and_the_round_goes_on_without_it(talk, caplog):
    talk.free = RESERVE_BYTES + 99
    talk.hear("a", offer(talk, "a", bytes(50)))
    (refused,) = answers(talk, "a")
    assert isinstance(refused, Refuse)
    assert "no room for 50 bytes" in refused.reason
    assert "no room for 50 bytes" in caplog.text
    member = talk.run.controller.engine_state.members["a"]
    assert member.answer == "declined"
    assert "no room" in member.declined_reason
    assert talk.run.controller.ledger.refusals_by_device == {"a": {"PacketForeign": 1}}

    talk.free = 10 * RESERVE_BYTES
    talk.send("b", TransferKey("update", talk.id, 1, 1), answered(talk.session("b"), talk.tasks["b"]))
    assert talk.run.controller.engine_state.round_attempt.number == 2


def test_room_that_was_promised_to_one_is_not_given_to_another(talk):
    talk.free = RESERVE_BYTES + 300
    talk.hear("a", offer(talk, "a", bytes(100)))
    assert isinstance(answers(talk, "a")[0], Resume)
    assert talk.server.parts.sessions.incoming_bytes == 100
    talk.hear("a", offer(talk, "a", bytes(100)))
    assert isinstance(answers(talk, "a")[0], Resume), "its own room is not counted twice"
    talk.hear("a", Chunk(offer(talk, "a", bytes(100)).transfer, 0, bytes(40)).encode(), "update")
    assert talk.server.parts.sessions.incoming_bytes == 60
    talk.hear("b", offer(talk, "b", bytes(100)))
    assert "60 bytes of other payloads are on their way" in answers(talk, "b")[0].reason


def test_what_an_earlier_process_left_makes_room_but_not_what_is_arriving(talk, monkeypatch):
    arriving = offer(talk, "a", bytes(200))
    talk.hear("a", arriving)
    talk.server.parts.sessions.memory.left_bytes = 0
    talk.hear("a", Chunk(arriving.transfer, 0, bytes(100)).encode(), "update")
    left = talk.run.folder / INCOMING / "gone" / f"{'1' * 32}.part"
    left.parent.mkdir()
    left.write_bytes(bytes(500))
    free = RESERVE_BYTES + 250
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: Usage(100 * RESERVE_BYTES, 0, free + 500 * (not left.exists()))
    )
    talk.hear("b", offer(talk, "b", bytes(100)))
    assert isinstance(answers(talk, "b")[0], Resume)
    assert not left.exists()
    assert (talk.run.folder / INCOMING / "a" / f"{arriving.transfer}.part").stat().st_size == 100


def test_only_parts_are_removed_and_only_old_ones(tmp_path):
    folder = tmp_path / INCOMING / "a"
    folder.mkdir(parents=True)
    for name, age_s in ("old.part", 2000), ("new.part", 0), ("wanted.part", 2000), ("other", 2000):
        (folder / name).write_bytes(b"1")
        written = (folder / name).stat().st_mtime - age_s
        os.utime(folder / name, (written, written))
    remove_old_parts(tmp_path, but={"wanted"}, older_than_s=1000)
    assert {path.name for path in folder.iterdir()} == {"new.part", "wanted.part", "other"}
