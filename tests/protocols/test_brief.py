"""JSON-like objects in few bytes: what is written reads back, and nothing that anybody sends does harm."""

import hashlib
import random
import struct
import tracemalloc
from pathlib import Path

import msgspec
import pytest
from msgspec.msgpack import Ext

from fleetune.protocols import brief
from fleetune.protocols.errors import PacketCorrupt
from fleetune.protocols.update import encodings

PAGE = Path(__file__).parents[2] / "docs" / "wire.md"
VALUES = [
    {"type": "Ack", "transfer": "7619983568d0c408a9c447c4b66c60fb", "offset": 8},
    {"reason": "p = 1: as wanted; takes 0.0827 s of 600 s", "power": "mains", "a name of its own": None},
    [0, 127, 128, -1, -32, -33, 2**32, -(2**63), 2**64 - 1, True, False],
    ["", "x" * 31, "x" * 32, "y" * 70_000, "é", "0badc0de", "0BADC0DE", "0badc0d", "0" * 64],
    {str(number): [[[]]] for number in range(20)},
    [0.1, 0.33333, 1e-9, 12.34, 123456.5, 1 / 3, 2**-10, 1e300, 5e-324, float("inf"), 1e20],
    list(range(70_000)),
    Ext(70, b"1234"),
    [b"\0" * 300, Ext(5, b"12")],
]


@pytest.mark.parametrize("value", VALUES, ids=map(str, range(len(VALUES))))
def test_what_is_written_reads_back(value):
    data = brief.write(value)
    assert brief.read(data) == value
    assert brief.read(b"xy" + data, 2) == value


def test_numbers_take_few_bytes():
    assert len(brief.write(12.34)) == len(brief.write(0.1)) == 5
    assert len(brief.write(1 / 3)) == 9
    assert brief.write(3.0) == b"\x03"
    assert str(brief.read(brief.write(-0.0))) == "-0.0"
    assert brief.read(brief.write(float("nan"))) != brief.read(brief.write(float("nan")))


@pytest.mark.parametrize(
    "value", [{1: 2}, {"a": {None: 1}}, Ext(1, b"\0"), Ext(2, b"\0"), Ext(5, b"123"), object(), {1, 2}]
)
def test_what_it_cannot_say_is_said_at_once(value):
    with pytest.raises(ValueError):
        brief.write(value)


def test_nothing_is_too_deep_to_refuse():
    deep = []
    for _ in range(2000):
        deep = [deep]
    with pytest.raises(ValueError, match="levels"):
        brief.write(deep)
    with pytest.raises(PacketCorrupt, match="levels"):
        brief.read(b"\x91" * 100_000)


def test_the_words_stay_as_they_are():
    """Another list is another wire: append to it with another version, and the page's digest with it."""
    digest = hashlib.blake2b("\n".join(brief.WORDS).encode(), digest_size=16).hexdigest()
    assert f"`{digest}`" in PAGE.read_text()
    assert len(set(brief.WORDS)) == len(brief.WORDS) < 128  # a key is one byte
    assert not set(brief.WORDS) & {*encodings.REGISTRY, "?", "?c", "f4", "f8"}
    assert not [
        word for word in brief.WORDS if len(word) in (8, 16, 32) and not set(word) - set("0123456789abcdef")
    ]


def test_the_page_names_every_word():
    section = PAGE.read_text().partition("## Brief")[2].partition("\n## ")[0]
    listed = section.partition("```\n")[2].partition("```")[0]
    assert tuple(listed.split()) == brief.WORDS


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x81",
        b"\x81\x7f\x01",  # a word beyond the list
        b"\x81\xff\x01",  # a key below 0
        b"\x81\xc3\x01",
        b"\x82\x01\x01\x01\x01",  # twice
        b"\xd4\x01\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xffx",
        b"\xc6\xff\xff\xff\xffx",
        b"\xa2\xff\xff",
        b"\xc1",
        b"\xc7\x03\x01abc",
        b"\x01\x01",
    ],
    ids=bytes.hex,
)
def test_what_makes_no_sense_is_refused(data):
    with pytest.raises(PacketCorrupt):
        brief.read(data)


def test_hostile_bytes_are_refused_or_read():
    rng, refused = random.Random(0), 0
    seeds = [brief.write(value) for value in VALUES if value is not VALUES[6] and value is not VALUES[3]]
    for _ in range(6000):
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.choice((1, 1, 2, 8))):
            place = rng.randrange(len(data) + 1)
            match rng.randrange(3):
                case 0:
                    data[place:place] = rng.randbytes(rng.choice((1, 2, 9)))
                case 1:
                    del data[place : place + rng.choice((1, 2, 9))]
                case _:
                    data[place : place + 1] = struct.pack("B", rng.randrange(256))
        try:
            brief.read(bytes(data))
        except PacketCorrupt:
            refused += 1
    assert refused > 1000


@pytest.mark.parametrize("item", [b"\x80", b"\x90", b"\xd4\x01\x01", b"\xca\0\0\0\1"], ids=bytes.hex)
def test_few_bytes_take_little_memory(item):
    data = b"\xdd" + struct.pack(">I", 16_000) + item * 16_000
    tracemalloc.start()
    brief.read(data)
    assert tracemalloc.get_traced_memory()[1] < 2_000_000
    tracemalloc.stop()


def test_it_is_messagepack():
    data = brief.write({"round": 3, "progress": 0.5, "stage": "training", "name of mine": "x"})
    number = brief.number_of
    wanted = {number("round"): 3, number("progress"): 0.5, "name of mine": "x"}
    found = msgspec.msgpack.decode(data)
    assert found.pop(number("stage")) == Ext(1, bytes([number("training")]))
    assert found == wanted
