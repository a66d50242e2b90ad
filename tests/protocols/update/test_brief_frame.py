"""The brief frame of updates: the same update in fewer bytes, whatever wrote its values."""

import random
import tracemalloc
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec
import numpy as np
import pytest
import zstandard
from tests.conftest import tiny_spec

from fleetune.protocols import brief
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
from fleetune.protocols.update import brief_frame, codec, encodings
from fleetune.protocols.update.base import Base
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.patch_values import PatchWriter
from fleetune.protocols.update.selection import Entries, Everything, Layers
from fleetune.protocols.wire.payloads import Measures, Reply

SPEC = tiny_spec()
LIMIT = codec.payload_limit(SPEC)
HELD = Key.of("held").generator().normal(0, 1, SPEC.size).astype(np.float32)
BASE = Base.whole(HELD)
MEASURES = Measures(140, 60, 2.2876201697758267, 1 / 6, 1.0, None, scores={"accuracy": 0.5, "ece": 0.1})
KIND = Reply[Update]


def reply(selection=None, spec=SPEC, held=HELD):
    values = held + Key.of("step").generator().normal(0, 0.01, spec.size).astype(np.float32)
    selection = selection or Everything()
    mask = selection.mask(spec)
    return Reply("device-0", 3, 1, False, MEASURES, Update(Patch(selection, values[mask]), 140), BASE.digest)


def written(of, name, briefly, spec=SPEC, base=BASE):
    writer = PatchWriter(encodings.find(name), spec, Key(1), base)
    return codec.encode(of, spec, writer=writer, briefly=briefly)


def read(data, **options):
    return codec.decode(data, KIND, SPEC, limit=LIMIT, base=BASE, **options)


def same(found, wanted):
    update, other = found.update.patch, wanted.update.patch
    assert np.array_equal(update.values, other.values)
    assert np.array_equal(update.selection.mask(SPEC), other.selection.mask(SPEC))
    assert (found.measures, found.base, found.device) == (wanted.measures, wanted.base, wanted.device)


ENTRIES = Entries(Key.of("mask").generator().random(SPEC.num_parameters) < 0.3)


@pytest.mark.parametrize("selection", [Everything(), Layers((next(iter(SPEC.layers)),)), ENTRIES], ids=type)
@pytest.mark.parametrize("name", [name for name in encodings.REGISTRY if name != "raw"])
def test_it_says_the_same_in_fewer_bytes(name, selection):
    long, short = (written(reply(selection), name, briefly) for briefly in (False, True))
    same(read(short), read(long))
    same(read(short, verified=True), read(long))
    assert len(short) <= len(long) - 50
    assert short == written(reply(selection), name, True)


def test_arrays_that_no_encoding_wrote_and_no_update_at_all():
    plain = codec.encode(reply(), SPEC, briefly=True)
    same(codec.decode(plain, KIND, SPEC, limit=LIMIT), reply())
    final = Reply("device-0", 3, 1, False, MEASURES, None)
    assert read(codec.encode(final, SPEC, briefly=True)) == final


def test_few_bytes_go_as_they_are_and_many_compressed():
    assert written(reply(), "sketch", True)[5] == 0
    long = tiny_spec(hidden=400)
    held = np.zeros(long.size, np.float32)
    update = reply(spec=long, held=held)
    data = codec.encode(update, long, briefly=True)
    assert data[5] == 1
    assert np.array_equal(
        codec.decode(data, KIND, long, limit=codec.payload_limit(long)).update.patch.values,
        update.update.patch.values,
    )


@dataclass(frozen=True)
class Odd:
    """What a user's method may send."""

    when: datetime | None
    data: bytes
    word: str


def test_what_it_cannot_say_goes_at_length():
    odd = Odd(datetime(2026, 11, 23, tzinfo=UTC), b"\0\1", "patch")
    assert codec.encode(odd, SPEC, briefly=True) == codec.encode(odd, SPEC)
    said = Odd(None, b"\0\1", "patch")
    assert codec.encode(said, SPEC, briefly=True)[4] == 2
    assert codec.decode(codec.encode(said, SPEC, briefly=True), Odd, SPEC, limit=LIMIT) == said


def forged(body, form=0):
    packed = body if form == 0 else zstandard.ZstdCompressor().compress(body)
    checksum = brief_frame._checksum(packed)
    return brief_frame.HEADER.pack(b"FLTN", 2, form, bytes.fromhex(SPEC.hash), checksum) + packed


def test_each_fault_has_its_name():
    good = written(reply(), "sketch", True)
    streamed = zstandard.ZstdCompressor(write_content_size=False).compress(b"\xc0")
    for fault, data in {
        PacketTruncated: [good[:-1], good[:10], good[:17]],
        PacketVersion: [good[:4] + b"\3" + good[5:]],
        PacketForeign: [good[:6] + bytes(8) + good[14:]],
        PacketTooLarge: [forged(b"\0" * (LIMIT + 1)), forged(b"\0" * (LIMIT + 1), 1)],
        PacketCorrupt: [
            forged(brief.write({"device": 3})),
            forged(b"\xc0\xc0"),
            forged(b""),
            good[:5] + b"\2" + good[6:],
            good[:5] + b"\1" + good[6:],
            forged(b"\x81\x7f\xc0"),
            good[:5] + b"\1" + good[6:14] + brief_frame._checksum(streamed) + streamed,
        ],
    }.items():
        for packet in data:
            with pytest.raises(fault):
                read(packet)


def test_hostile_bytes_are_refused_or_read():
    rng, refused = random.Random(2), 0
    names = [name for name in encodings.REGISTRY if name != "raw"]
    bodies = [written(reply(ENTRIES), name, True) for name in names]
    bodies = [
        packet[18:] if packet[5] == 0 else zstandard.ZstdDecompressor().decompress(packet[18:])
        for packet in bodies
    ]
    for _ in range(3000):
        body = bytearray(rng.choice(bodies))
        for _ in range(rng.choice((1, 2, 8))):
            body[rng.randrange(min(len(body), 120))] = rng.randrange(256)
        try:
            read(forged(bytes(body), rng.randrange(2)))
        except PacketError:
            refused += 1
    assert refused > 1000


@pytest.mark.parametrize("item", [b"\x80", b"\x90", b"\xd4\x01\x05", b"\xa0"], ids=bytes.hex)
def test_a_kilobyte_takes_little_memory(item):
    count = codec.MAX_ELEMENTS - 10
    packet = forged(b"\xdd" + count.to_bytes(4, "big") + item * count, 1)
    assert len(packet) < 1000
    tracemalloc.start()
    with pytest.raises(PacketError):
        read(packet)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_500_000


def test_own_state_reads_what_was_sent_briefly():
    data = written(reply(), "lossless", True)
    same(codec.decode(data, KIND, SPEC, base=BASE), reply())
    assert (
        msgspec.msgpack.decode(brief_frame.at_length(brief.write({"base": BASE.digest})))["base"]
        == BASE.digest
    )
