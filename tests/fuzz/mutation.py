"""Mutations of packets: of what they say, by their structure, and of their bytes."""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import zstandard

from fleetune.protocols.update import codec

NUMBERS = [*range(-2, 4), 7, *(2**power for power in (7, 15, 16, 31, 32, 39, 40, 53, 60, 63))]
NUMBERS += [-(2**31), -(2**63), 2**31 - 1, 2**63 - 1, 2**64 - 1]
REALS = [
    float("nan"),
    float("inf"),
    -float("inf"),
    -0.0,
    5e-324,
    1e-30,
    0.5,
    1.0,
    1e15,
    1e30,
    3e38,
    1e308,
    -1.0,
]
TEXTS = [
    "",
    "\n",
    "\0",
    "a",
    "n",
    "../..",
    "a/b",
    "é",
    "\U0001f600",
    "x" * 65,
    "x" * 301,
    "x" * 5000,
    "1" * 400,
]
OTHERS = [None, True, False, b"", b"\0" * 7, [], {}, [[]], [{}], ["?", [8], b"\1"], ["f4", [1], b"\0" * 4]]

Change = Callable[[random.Random, Any], Any]


@dataclass(frozen=True)
class Wrapping:
    """How plain lists and maps become a packet, and back."""

    read: Callable[[bytes], Any]
    write: Callable[[Any, bytes], bytes]


def _write_json(content: Any, _: bytes) -> bytes:
    try:
        return msgspec.json.encode(content)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return repr(content).encode("utf-8", "replace")


def _read_payload(packet: bytes) -> Any:
    return msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(packet[codec._HEADER.size :]))


def _write_payload(content: Any, packet: bytes) -> bytes:
    return wrapped(msgspec.msgpack.encode(content), packet)


def wrapped(body: bytes, packet: bytes) -> bytes:
    """`body` in place of that of a payload, with a checksum that is right."""
    packed = zstandard.ZstdCompressor(level=1).compress(body)
    head = codec.MAGIC, codec.VERSION, packet[8:16], len(body), codec._checksum(packed)
    return codec._HEADER.pack(*head) + packed


JSON = Wrapping(msgspec.json.decode, _write_json)
PAYLOAD = Wrapping(_read_payload, _write_payload)


def mutated(rng: random.Random, packet: bytes, wrapping: Wrapping | None, donor: Any = None) -> bytes:
    """`packet` with a few changes, mostly of what it says; `donor` lends parts of another packet."""
    kind = rng.random()
    if wrapping is None or kind < 0.1:
        return changed_bytes(rng, packet)
    if wrapping is PAYLOAD and kind < 0.2:
        body = zstandard.ZstdDecompressor().decompress(packet[codec._HEADER.size :])
        return wrapped(changed_bytes(rng, body), packet)
    content = wrapping.read(packet)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        content = _changed(rng, content, donor)
    try:
        return wrapping.write(content, packet)
    except (OverflowError, ValueError, TypeError, RecursionError):  # what no format can hold
        return changed_bytes(rng, packet)


def _changed(rng: random.Random, content: Any, donor: Any) -> Any:
    """One place of it, at a random depth, is another now."""
    path, here = [], content
    while isinstance(here, dict | list) and here and rng.random() < 0.85:
        key = rng.choice(list(here) if isinstance(here, dict) else range(len(here)))
        path.append((here, key))
        here = here[key]
    new = _other(rng, here, donor)
    if not path:
        return new
    parent, key = path[-1]
    parent[key] = new
    return content


def _other(rng: random.Random, value: Any, donor: Any) -> Any:  # noqa: PLR0911 - one for each type
    """Something in place of a value: a neighbour of it, or of any kind."""
    if rng.random() < 0.15:
        return rng.choice([*NUMBERS, *REALS, *TEXTS, *OTHERS])
    if rng.random() < 0.1 and donor is not None:
        return copy.deepcopy(_part(rng, donor))
    match value:
        case bool():
            return not value
        case int():
            return rng.choice([value + 1, value - 1, -value, value * 2, rng.choice(NUMBERS)])
        case float():
            return rng.choice([value * 2, -value, value + 1, rng.choice(REALS)])
        case str():
            return rng.choice([value + "x", value[:-1], value.upper(), rng.choice(TEXTS)])
        case bytes():
            return changed_bytes(rng, value)
        case list():
            return _list(rng, value)
        case dict():
            return _map(rng, value)
    return rng.choice([*NUMBERS, *TEXTS])


def _part(rng: random.Random, content: Any) -> Any:
    while isinstance(content, dict | list) and content and rng.random() < 0.7:
        content = rng.choice(list(content.values()) if isinstance(content, dict) else content)
    return content


def _list(rng: random.Random, value: list[Any]) -> list[Any]:
    value = list(value)
    match rng.randrange(6):
        case 0:
            return []
        case 1:
            return value * rng.choice((2, 3, 40))
        case 2 if value:
            value.pop(rng.randrange(len(value)))
        case 3 if value:
            value.insert(rng.randrange(len(value)), copy.deepcopy(rng.choice(value)))
        case 4:
            rng.shuffle(value)
        case _:
            value.append(rng.choice([*NUMBERS, *TEXTS, *OTHERS]))
    return value


def _map(rng: random.Random, value: dict[Any, Any]) -> dict[Any, Any]:
    value = dict(value)
    match rng.randrange(4):
        case 0:
            return {}
        case 1 if value:
            value.pop(rng.choice(list(value)))
        case 2 if len(value) > 1:
            first, second = rng.sample(list(value), 2)
            value[first], value[second] = value[second], value[first]
        case _:
            value[rng.choice(TEXTS)] = rng.choice([*NUMBERS, *OTHERS])
    return value


def changed_bytes(rng: random.Random, data: bytes) -> bytes:
    """`data` with a few bits turned, bytes cut off, put in, doubled."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(6):
            case 0 if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case 1:
                del changed[at:]
            case 2:
                changed[at:at] = rng.randbytes(rng.choice((1, 4, 16)))
            case 3:
                del changed[at : at + rng.choice((1, 2, 8, 100))]
            case 4:
                changed[at:at] = changed[at : at + rng.choice((1, 8, 64))]
            case _ if at < len(changed):
                changed[at] = rng.choice((0, 1, 0x7F, 0x80, 0xC0, 0xDC, 0xDD, 0xDF, 0xFF))
    return bytes(changed)
