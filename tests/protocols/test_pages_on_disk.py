"""What waits to be sent lies on disk and is the same bytes."""

import mmap

import pytest

from fleetune.protocols.errors import StoreError
from fleetune.protocols.pages_on_disk import SMALL_BYTES, bytes_on_disk
from fleetune.protocols.wire.messages import Offer, TransferKey
from fleetune.protocols.wire.outbox import Outbox


def test_a_large_payload_is_mapped_from_a_file_without_a_name(tmp_path):
    payload = bytes(range(256)) * 1024
    waiting = bytes_on_disk(payload, tmp_path)
    assert isinstance(waiting, mmap.mmap)
    assert waiting[:] == payload
    assert list(tmp_path.iterdir()) == []


def test_a_small_one_stays_as_it_is(tmp_path):
    payload = b"x" * (SMALL_BYTES - 1)
    assert bytes_on_disk(payload, tmp_path) is payload


def test_an_outbox_sends_it_like_any_other(tmp_path):
    payload = bytes(range(256)) * 1024
    outbox = Outbox("d")
    offer, *chunks = outbox.post(TransferKey("task", "r", 1, 1), bytes_on_disk(payload, tmp_path), 0.0)
    assert isinstance(offer, Offer)
    assert b"".join(bytes(chunk.data) for chunk in chunks) == payload[: sum(len(c.data) for c in chunks)]
    assert chunks


def test_no_room_is_one_line(tmp_path):
    with pytest.raises(StoreError, match="cannot write to"):
        bytes_on_disk(b"x" * SMALL_BYTES, tmp_path / "nowhere")
