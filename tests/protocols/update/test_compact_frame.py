"""The compact frame of updates: the same update in fewer bytes, whatever wrote its values."""

import hashlib
import random
import tracemalloc
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec
import numpy as np
import pytest
import zstandard
from tests.conftest import tiny_spec

from fleetune.protocols.errors import (
    PacketCorrupt,
    PacketError,
    PacketForeign,
    PacketTooLarge,
    PacketTruncated,
    PacketVersion,
)
from fleetune.protocols.method.averaging import Update
from fleetune.protocols.randomness import Key
from fleetune.protocols.update import codec, compact_frame, encodings
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.patch_values import PatchWriter
from fleetune.protocols.update.reference_model import ReferenceModel
from fleetune.protocols.update.selection import Entries, Everything, Layers
from fleetune.protocols.wire.payloads import Measures, Reply

SPEC = tiny_spec()
LIMIT = codec.payload_limit(SPEC)
HELD = Key.of("held").generator().normal(0, 1, SPEC.size).astype(np.float32)
BASE = ReferenceModel.whole(HELD)
MEASURES = Measures(140, 60, 2.2876201697758267, 1 / 6, 1.0, None, scores={"accuracy": 0.5, "ece": 0.1})
KIND = Reply[Update]
DIGEST = "8a40e578a9493032762b9e8d96810060"


def reply(selection=None, spec=SPEC, held=HELD):
    values = held + Key.of("step").generator().normal(0, 0.01, spec.size).astype(np.float32)
    selection = selection or Everything()
    mask = selection.mask(spec)
    return Reply("device-0", 3, 1, False, MEASURES, Update(Patch(selection, values[mask]), 140), BASE.digest)


def written(of, name, compact, spec=SPEC, reference=BASE):
    writer = PatchWriter(encodings.find(name), spec, Key(1), reference)
    return codec.encode(of, spec, writer=writer, compact=compact)


def read(data, **options):
    return codec.decode(data, KIND, SPEC, limit=LIMIT, reference=BASE, **options)


def same(found, wanted):
    update, other = found.update.patch, wanted.update.patch
    assert np.array_equal(update.values, other.values)
    assert np.array_equal(update.selection.mask(SPEC), other.selection.mask(SPEC))
    assert (found.measures, found.base, found.device) == (
        wanted.measures,
        wanted.base,
        wanted.device,
    )


ENTRIES = Entries(Key.of("mask").generator().random(SPEC.num_parameters) < 0.3)


@pytest.mark.parametrize("selection", [Everything(), Layers((next(iter(SPEC.layers)),)), ENTRIES], ids=type)
@pytest.mark.parametrize("name", [name for name in encodings.REGISTRY if name != "raw"])
def test_it_says_the_same_in_fewer_bytes(name, selection):
    long, short = (written(reply(selection), name, compact) for compact in (False, True))
    same(read(short), read(long))
    same(read(short, verified=True), read(long))
    assert len(short) <= len(long) - 50
    assert short == written(reply(selection), name, True)


def test_arrays_that_no_encoding_wrote_and_no_update_at_all():
    plain = codec.encode(reply(), SPEC, compact=True)
    same(codec.decode(plain, KIND, SPEC, limit=LIMIT), reply())
    final = Reply("device-0", 3, 1, False, MEASURES, None)
    assert read(codec.encode(final, SPEC, compact=True)) == final


@dataclass(frozen=True)
class Odd:
    """What a user's method may send."""

    when: datetime | None
    data: bytes
    numbers: dict[str, float]


def test_whatever_a_method_sends_is_compact():
    odd = Odd(datetime(2026, 11, 23, tzinfo=UTC), b"\0\1", {"odd": 0.5})
    data = codec.encode(odd, SPEC, compact=True)
    assert data[4] == compact_frame.VERSION
    assert codec.decode(data, Odd, SPEC, limit=LIMIT) == odd


def test_the_dictionary_is_part_of_the_version():
    """Another one would read the same bytes as another update."""
    assert hashlib.blake2b(compact_frame.DICTIONARY.as_bytes(), digest_size=16).hexdigest() == DIGEST


def forged(body, dictionary=compact_frame.DICTIONARY, **options):
    packed = zstandard.ZstdCompressor(dict_data=dictionary, **options).compress(body)
    checksum = compact_frame._checksum(packed)
    return compact_frame.HEADER.pack(b"FLTN", 4, bytes.fromhex(SPEC.hash), checksum) + packed


def test_each_fault_has_its_name():
    good = written(reply(), "sketch", True)
    for fault, data in {
        PacketTruncated: [good[:-1], good[:10], good[:16]],
        PacketVersion: [good[:4] + b"\2" + good[5:], good[:4] + b"\3" + good[5:]],
        PacketForeign: [good[:5] + bytes(8) + good[13:]],
        PacketTooLarge: [forged(b"\0" * (LIMIT + 1))],
        PacketCorrupt: [
            forged(msgspec.msgpack.encode({"device": 3})),
            forged(b"\xc0\xc0"),
            forged(b""),
            forged(b"\x81\x7f\xc0"),
            forged(b"\xc0", write_content_size=False),
        ],
    }.items():
        for packet in data:
            with pytest.raises(fault):
                read(packet)


def body_of(packet):
    return zstandard.ZstdDecompressor(dict_data=compact_frame.DICTIONARY).decompress(packet[17:])


def test_hostile_bytes_are_refused_or_read():
    rng, refused = random.Random(2), 0
    names = [name for name in encodings.REGISTRY if name != "raw"]
    bodies = [body_of(written(reply(ENTRIES), name, True)) for name in names]
    for _ in range(3000):
        body = bytearray(rng.choice(bodies))
        for _ in range(rng.choice((1, 2, 8))):
            body[rng.randrange(min(len(body), 120))] = rng.randrange(256)
        try:
            read(forged(bytes(body)))
        except PacketError:
            refused += 1
    assert refused > 1000


def test_hostile_frames_are_refused_or_read():
    rng, refused = random.Random(3), 0
    good = written(reply(), "sketch", True)
    for _ in range(2000):
        packed = bytearray(good[17:])
        for _ in range(rng.choice((1, 2, 8))):
            packed[rng.randrange(len(packed))] = rng.randrange(256)
        try:
            read(good[:13] + compact_frame._checksum(packed) + packed)
        except PacketError:
            refused += 1
    assert refused > 500


@pytest.mark.parametrize("item", [b"\x80", b"\x90", b"\xd4\x01\x05", b"\xa0"], ids=bytes.hex)
def test_a_kilobyte_takes_little_memory(item):
    count = codec.MAX_ELEMENTS - 10
    packet = forged(b"\xdd" + count.to_bytes(4, "big") + item * count)
    assert len(packet) < 1000
    tracemalloc.start()
    with pytest.raises(PacketError):
        read(packet)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_500_000


def test_own_state_reads_a_compact_update():
    data = written(reply(), "lossless", True)
    same(codec.decode(data, KIND, SPEC, reference=BASE), reply())
