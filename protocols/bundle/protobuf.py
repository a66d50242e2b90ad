"""The few kinds of protobuf field that ONNX files are made of, written and read by hand.

Wire format: protobuf.dev/programming-guides/encoding. A field is a key (its number and how long its value
is), then the value. Messages put one behind the other read as one message with the fields of both.
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fleetune.protocols.errors import PacketCorrupt, PacketTooLarge

_VARINT, _FIXED_8, _BYTES, _FIXED_4 = 0, 1, 2, 5
_WIDTHS = {_FIXED_8: 8, _FIXED_4: 4}
_MAX_VARINT_BYTES = 10
MAX_FIELDS = 50_000  # of one message: nodes of a graph, as a rule


@dataclass(frozen=True)
class Field:
    """One field of a message.

    Attributes:
        number: which one.
        value: of a text, of bytes or of a message; empty for numbers.
        whole: the field as it stands, key included.
    """

    number: int
    value: bytes
    whole: bytes


def number(field: int, value: int) -> bytes:
    """A whole number, negative ones as two's complement of 64 bits."""
    return _varint(field << 3 | _VARINT) + _varint(value & (1 << 64) - 1)


def real(field: int, value: float) -> bytes:
    """A float of 4 bytes."""
    return _varint(field << 3 | _FIXED_4) + struct.pack("<f", value)


def binary(field: int, value: bytes) -> bytes:
    """Bytes as they are."""
    return _varint(field << 3 | _BYTES) + _varint(len(value)) + value


def text(field: int, value: str) -> bytes:
    """A string."""
    return binary(field, value.encode())


def message(field: int, parts: Iterable[bytes]) -> bytes:
    """A message of these fields."""
    return binary(field, b"".join(parts))


def fields(data: bytes) -> Iterator[Field]:
    """The fields of a message, in the order in which they stand.

    Raises:
        PacketCorrupt: it is none.
        PacketTooLarge: it has too many.
    """
    start = count = 0
    while start < len(data):
        count += 1
        if count > MAX_FIELDS:
            raise PacketTooLarge(f"a protobuf message of more than {MAX_FIELDS} fields")
        key, at = _read_varint(data, start)
        kind = key & 7
        value, end = b"", at
        if kind == _VARINT:
            _, end = _read_varint(data, at)
        elif kind == _BYTES:
            size, at = _read_varint(data, at)
            value, end = data[at : at + size], at + size
        elif kind in _WIDTHS:
            end = at + _WIDTHS[kind]
        else:
            raise PacketCorrupt(f"not a protobuf message: a field of kind {kind} at byte {start}")
        if end > len(data):
            raise PacketCorrupt(f"a protobuf message is cut short at byte {start}")
        yield Field(key >> 3, value, data[start:end])
        start = end


def texts(data: bytes, field: int) -> list[str]:
    """The values of a message's text field of this number.

    Raises:
        PacketCorrupt: it is no message, or they are no text.
    """
    try:
        return [one.value.decode() for one in fields(data) if one.number == field]
    except UnicodeDecodeError:
        raise PacketCorrupt(f"a protobuf message has no text in field {field}") from None


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that starts at `at`, and where it ends."""
    value = 0
    for index, byte in enumerate(data[at : at + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, at + index + 1
    raise PacketCorrupt(f"a protobuf message is cut short at byte {at}")
