"""Writes and reads the few kinds of protobuf field that ONNX files use.

Wire format: protobuf.dev/programming-guides/encoding. A field is a key (its number and the kind of its value)
and the value. Two messages in a row read as one message with the fields of both.
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fleetune.protocols.errors import PacketCorrupt, PacketTooLarge

_VARINT, _FIXED_8, _BYTES, _FIXED_4 = 0, 1, 2, 5
_WIDTHS = {_FIXED_8: 8, _FIXED_4: 4}
_MAX_VARINT_BYTES = 10
MAX_FIELDS = 50_000  # fields of one message, typically the nodes of a graph


@dataclass(frozen=True)
class Field:
    """One field of a message.

    Attributes:
        number: number of the field.
        value: content of a text, bytes or message field; empty for numbers.
        whole: all bytes of the field, key included.
    """

    number: int
    value: bytes
    whole: bytes


def number(field: int, value: int) -> bytes:
    """Return a field with a whole number; negative numbers in 64-bit two's complement."""
    return _varint(field << 3 | _VARINT) + _varint(value & (1 << 64) - 1)


def real(field: int, value: float) -> bytes:
    """Return a field with a 4-byte float."""
    return _varint(field << 3 | _FIXED_4) + struct.pack("<f", value)


def binary(field: int, value: bytes) -> bytes:
    """Return a field with bytes."""
    return _varint(field << 3 | _BYTES) + _varint(len(value)) + value


def text(field: int, value: str) -> bytes:
    """Return a field with a text."""
    return binary(field, value.encode())


def message(field: int, parts: Iterable[bytes]) -> bytes:
    """Return a field with a message made of these fields."""
    return binary(field, b"".join(parts))


def fields(data: bytes) -> Iterator[Field]:
    """Yield the fields of a message in their order.

    Raises:
        PacketCorrupt: `data` is no message.
        PacketTooLarge: it has too many fields.
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
    """Return the texts in all fields of a message with this number.

    Raises:
        PacketCorrupt: `data` is no message, or the values are not UTF-8.
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
    """Return the number that starts at `at`, and the position after it."""
    value = 0
    for index, byte in enumerate(data[at : at + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, at + index + 1
    raise PacketCorrupt(f"a protobuf message is cut short at byte {at}")
