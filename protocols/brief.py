"""JSON-like objects in few bytes: MessagePack with names as numbers. For thin uplinks (docs/wire.md).

    a key in a map   the number of the name among `WORDS`, or the name as text
    a text           the number of a word among `WORDS`, as an extension of type 1; a text of 8, 16 or 32
                     small hex digits as the bytes that it stands for, as an extension of type 2; others as
                     text
    a number         a whole one as an integer; any other as float32, which stands for the nearest decimal
                     number of six digits, or where that is another number as float64

What is written reads back as the same, but for whole numbers: 1.0 comes back as 1.
"""

import math
import re
import struct
from typing import Any

import msgspec
from msgspec.msgpack import Ext

from fleetune.protocols.errors import PacketCorrupt

MAX_DEPTH = 32

# Their numbers are the wire: words are never moved, changed or added without another version of what is
# written with them. None may be the name of an encoding or of a dtype, which arrays begin with.
WORDS = tuple(
    """
    Offer Resume Ack Refuse Fetch Lacking Ready Working Measured Decline Finish Left Ping Pong
    type transfer digest num_bytes errand ratio kind run round attempt rehearsal offset reason what model_hash
    report base stage progress actual predicted diverged nonce
    bytes_down bytes_up download_s train_s upload_s memory_bytes joules
    device board num_samples samples_per_s uplink_bps downlink_bps round_s conditions new_samples drift
    power battery watts celsius throttled metered
    leaving measures update num_test train_loss before after personal kept scores adopted alone gain
    gain_error release holds found new old error by_samples patch selection values names key active bitmap
    share start critical loss rate accuracy
    enrolment bundle backbone task training evaluating mains charging
    Everything Layers Neurons ChosenNeurons Entries DrawnEntries
    generic coral-dev-board jetson-nano jetson-orin-nano n100-gateway phone-low phone-mid raspberry-pi-3b-plus
    raspberry-pi-4b raspberry-pi-5 raspberry-pi-zero-2w
    """.split()  # noqa: SIM905 - a list would take a page
)
_NUMBERS = {word: number for number, word in enumerate(WORDS)}
_WORD, _HEX = 1, 2  # types of extensions
_HEX_CODES = {8: 0xD6, 16: 0xD7, 32: 0xD8}  # of so many digits
_HEX_TEXT = re.compile(r"[0-9a-f]*")
_HEADS = {  # of an element: below 16, from 16 on, from 65,536 on
    dict: (0x80, 0xDE, 0xDF),
    list: (0x90, 0xDC, 0xDD),
}
_NUMBER_FORMS = {0xCA + place: f">{letter}" for place, letter in enumerate("fdBHIQbhiq")}
_LENGTH_FORMS: dict[int, tuple[str, type]] = {
    **{0xC4 + place: (f">{letter}", bytes) for place, letter in enumerate("BHI")},
    **{0xD9 + place: (f">{letter}", str) for place, letter in enumerate("BHI")},
    **{_HEADS[kind][1] + place: (f">{letter}", kind) for kind in _HEADS for place, letter in enumerate("HI")},
}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_FIXED_EXTENSIONS = {0xD4 + power: 2**power for power in range(5)}


def write(value: Any) -> bytes:
    """What JSON could hold, a tuple as a list, and bytes and extensions that are none of ours.

    Raises:
        ValueError: it holds something else, or deeper than `MAX_DEPTH`.
    """
    out = bytearray()
    _write(value, out, 0)
    return bytes(out)


def read(data: bytes, at: int = 0) -> Any:
    """What was written, from this place to the end; extensions of other types are left as `Ext`, which have
    1, 2, 4, 8 or 16 bytes.

    What it takes is bounded by the length of the data.

    Raises:
        PacketCorrupt: it cannot be read.
    """
    try:
        reader = _Reader(data, at)
        found = reader.value(0)
        if reader.at != len(data):
            raise PacketCorrupt("brief: something stands behind its end")
    except (IndexError, struct.error, UnicodeDecodeError) as problem:
        raise PacketCorrupt(f"brief: {problem}") from None
    return found


def number_of(word: str) -> int:
    """Among `WORDS`."""
    return _NUMBERS[word]


def _write(value: Any, out: bytearray, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"more than {MAX_DEPTH} levels")
    if isinstance(value, dict):
        out += _head(value)
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ValueError(f"a key that is no text: {key!r}")  # noqa: TRY004 - of what is inside
            number = _NUMBERS.get(key)
            out += msgspec.msgpack.encode(key if number is None else number)
            _write(inner, out, depth + 1)
    elif isinstance(value, list | tuple):
        out += _head(list(value))
        for inner in value:
            _write(inner, out, depth + 1)
    else:
        out += _single(value)


def _head(value: dict[Any, Any] | list[Any]) -> bytes:
    few, many, most = _HEADS[type(value)]
    if len(value) < 16:
        return bytes([few + len(value)])
    return (
        struct.pack(">BH", many, len(value)) if len(value) < 2**16 else struct.pack(">BI", most, len(value))
    )


def _single(value: Any) -> bytes:
    """Of what holds nothing else."""
    if isinstance(value, str):
        if value in _NUMBERS:
            return bytes((0xD4, _WORD, _NUMBERS[value]))
        if len(value) in _HEX_CODES and _HEX_TEXT.fullmatch(value):
            return bytes((_HEX_CODES[len(value)], _HEX)) + bytes.fromhex(value)
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, Ext):
        length = memoryview(value.data).nbytes
        if value.code in (_WORD, _HEX) or length not in _FIXED_EXTENSIONS.values():
            raise ValueError(f"an extension of type {value.code} with {length} bytes")
    if not isinstance(value, str | int | bytes | Ext | None):
        raise ValueError(f"a {type(value).__name__}")  # noqa: TRY004 - of what is inside
    return msgspec.msgpack.encode(value)


def _number(value: float) -> bytes:
    minus_zero = value == 0 and math.copysign(1, value) < 0
    if value.is_integer() and abs(value) < 2**53 and not minus_zero:
        return msgspec.msgpack.encode(int(value))
    try:
        packed = struct.pack(">f", value)
    except OverflowError:
        return struct.pack(">Bd", 0xCB, value)
    exact = _decimal(struct.unpack(">f", packed)[0]) == value
    return b"\xca" + packed if exact else struct.pack(">Bd", 0xCB, value)


def _decimal(value: float) -> float:
    """The decimal number of six digits that a float32 stands for."""
    return float(f"{value:.6g}")


class _Reader:
    """What is brief, element by element; each takes a byte at least.

    Raises:
        PacketCorrupt, IndexError, struct.error, UnicodeDecodeError: it cannot be read.
    """

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self.at = data, at

    def value(self, depth: int) -> Any:
        """What comes next, so deep in others."""
        code = self._unpacked(">B")
        if code < 0x80 or code >= 0xE0:
            return code if code < 0x80 else code - 256
        if code < 0xA0:
            return self._holding(dict if code < 0x90 else list, code & 0x0F, depth)
        if code < 0xC0:
            return self._holding(str, code & 0x1F, depth)
        if code in _LENGTH_FORMS:
            form, kind = _LENGTH_FORMS[code]
            return self._holding(kind, self._unpacked(form), depth)
        return self._single(code)

    def _single(self, code: int) -> Any:
        if code in _NUMBER_FORMS:
            found = self._unpacked(_NUMBER_FORMS[code])
            return _decimal(found) if code == 0xCA else found
        if code in _FIXED_EXTENSIONS:
            return self._extension(_FIXED_EXTENSIONS[code])
        if code not in _CONSTANTS:
            raise PacketCorrupt(f"brief: code {code:#x} has no place in it")
        return _CONSTANTS[code]

    def _holding(self, kind: type, length: int, depth: int) -> Any:
        if kind in (bytes, str):
            data = self._taken(length)
            return data if kind is bytes else data.decode()
        if depth == MAX_DEPTH:
            raise PacketCorrupt(f"brief: more than {MAX_DEPTH} levels")
        if kind is list:
            return [self.value(depth + 1) for _ in range(length)]
        found = dict[str, Any]()
        for _ in range(length):
            name = self._name()
            if name in found:
                raise PacketCorrupt(f"brief: {name!r} stands in a map twice")
            found[name] = self.value(depth + 1)
        return found

    def _name(self) -> str:
        key = self.value(MAX_DEPTH)
        if type(key) is int and key >= 0:
            return WORDS[key]
        if not isinstance(key, str):
            raise PacketCorrupt("brief: a key that is neither a word nor text")
        return key

    def _extension(self, length: int) -> Any:
        kind = self._unpacked(">b")
        data = self._taken(length)
        if kind == _WORD and length == 1:
            return WORDS[data[0]]
        return data.hex() if kind == _HEX else Ext(kind, data)

    def _unpacked(self, form: str) -> Any:
        (found,) = struct.unpack_from(form, self._data, self.at)
        self.at += struct.calcsize(form)
        return found

    def _taken(self, length: int) -> bytes:
        data = self._data[self.at : self.at + length]
        if len(data) < length:
            raise PacketCorrupt("brief: it is cut short")
        self.at += length
        return bytes(data)
