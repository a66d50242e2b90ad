"""Walks a MessagePack body element by element, separates its arrays, and checks everything against limits.

This protects the reader from three problems. A megabyte of empty maps would become 64 MB of objects. Deeply
nested lists would overflow a recursive reader. An array that is decoded with the rest would be in memory
twice.
Format: github.com/msgpack/msgpack/blob/master/spec.md.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from fleetune.protocols.errors import PacketCorrupt, PacketTooLarge
from fleetune.protocols.update.body import STEP, Body

MAX_DEPTH = 32
PLACE = 0x46  # type of the MessagePack extension, a 4-byte number, that replaces an array's data

_FIXED = {  # code: number of bytes of the value after it
    0xCA: 4,
    0xCB: 8,
    **{0xCC + n: 2**n for n in range(4)},
    **{0xD0 + n: 2**n for n in range(4)},
    **{0xD4 + n: 1 + 2**n for n in range(5)},
}
_SIZED = {  # code: number of bytes of the length after it, and bytes in addition to that length
    **{0xC4 + n: (2**n, 0) for n in range(3)},
    **{0xC7 + n: (2**n, 1) for n in range(3)},
    **{0xD9 + n: (2**n, 0) for n in range(3)},
}
# number of bytes of the length, and elements per item
_HOLDING = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
_TYPE_AT = {0xC7: 2, 0xC8: 3, 0xC9: 5, **{0xD4 + n: 1 for n in range(5)}}  # offset of an extension's type
_LONGEST_START = 6  # longest start of an element: code, length, and an extension's type
_LONGEST_HEAD = 192  # longest head of an array: a text of 31 bytes, 15 numbers of 9 bytes, and three lengths

T = TypeVar("T")


@dataclass(frozen=True)
class Head:
    """The bytes of an array [name, shape, data] before its data.

    Attributes:
        name: dtype, or name of the encoding that wrote the values.
        shape: shape that the message states.
        length: number of bytes of the data.
        text: bytes of the list's header, the name and the shape.
        size: number of all bytes before the data.
    """

    name: str
    shape: list[int]
    length: int
    text: bytes
    size: int


def without_arrays(
    body: Body,
    lift: Callable[[Head, Body], T],
    *,
    most: int | None = None,
    most_bytes: int | None = None,
) -> tuple[bytes, list[T]]:
    """Read the value in `body`, and return it separately from the data of its arrays.

    The running time is limited by `most` and by the length of the body.

    Args:
        body: the body, at its start.
        lift: called with the head of each array; it reads the data from the body and returns an object.
        most: largest number of elements, keys included; None for no limit.
        most_bytes: largest number of bytes without the arrays' data; None for no limit.

    Returns:
        The value as MessagePack, with a numbered `PLACE` for the data of each array; and the objects from
        `lift` by number.

    Raises:
        PacketTooLarge: the body has more elements or bytes, or, if `most` is given, more than `MAX_DEPTH`
            levels.
        PacketCorrupt: the body ends too early or continues after its value.
    """
    remainder, lifted = _Remainder(body, most_bytes), list[T]()
    count, waiting = 0, [1]  # elements still to come on each level
    while waiting:
        if not waiting[-1]:
            waiting.pop()
            continue
        waiting[-1] -= 1
        head = _head(body)
        count += 1 if head is None else 4 + len(head.shape)
        if most is not None and (count > most or len(waiting) > MAX_DEPTH):
            raise PacketTooLarge(
                f"the payload has more than {most} elements, or more than {MAX_DEPTH} levels"
            )
        if head is not None:
            body.skip(head.size)
            remainder.data += head.text + bytes([0xD6, PLACE]) + len(lifted).to_bytes(4, "big")
            lifted.append(lift(head, body))
        elif held := remainder.element():
            waiting.append(held)
    if body.at != body.num_bytes:
        raise PacketCorrupt(f"the payload has {body.num_bytes - body.at} bytes after its end")
    return bytes(remainder.data), lifted


@dataclass
class _Remainder:
    """Copies the parts of `body` other than arrays' data into `data`, at most `most` bytes."""

    body: Body
    most: int | None
    data: bytearray = field(default_factory=bytearray)

    def element(self) -> int:
        """Copy the next element without its children, and return the number of its children."""
        size, held = _extent(self.body.peek(_LONGEST_START))
        if self.most is not None and len(self.data) + size > self.most:
            raise PacketTooLarge(f"the payload has more than {self.most} bytes in addition to its arrays")
        for start in range(0, size, STEP):
            self.data += self.body.read(min(STEP, size - start))
        if held > self.body.num_bytes - self.body.at:  # each element takes at least one byte
            raise PacketCorrupt(f"the payload announces {held} elements, but has fewer bytes left")
        return held


def _extent(first: bytes) -> tuple[int, int]:
    """Return the length of the element that starts with these bytes, and the number of its children.

    The children do not count towards the length.
    """
    if not first:
        raise PacketCorrupt("the payload ends in the middle of a value")
    code = first[0]
    if code < 0x80 or code >= 0xE0 or 0xC0 <= code <= 0xC3:
        return 1, 0
    if code < 0xA0:
        return 1, code & 0x0F if code >= 0x90 else 2 * (code & 0x0F)
    if code < 0xC0:
        return 1 + (code & 0x1F), 0
    type_at = _TYPE_AT.get(code)
    if type_at is not None and first[type_at : type_at + 1] == bytes([PLACE]):
        raise PacketCorrupt(
            f"the payload contains a MessagePack extension of type {PLACE}, which is reserved"
        )
    if code in _FIXED:
        return 1 + _FIXED[code], 0
    width, more = _SIZED.get(code) or _HOLDING[code]
    length = int.from_bytes(first[1 : 1 + width], "big")
    if code in _SIZED:
        return 1 + width + length + more, 0
    return 1 + width, length * more


def _head(body: Body) -> Head | None:
    """Return the head of an array if [text, [whole numbers], bytes] comes next, else None; read nothing."""
    if body.peek(1) != b"\x93":
        return None
    ahead = body.peek(_LONGEST_HEAD)
    try:
        at = 2 + (ahead[1] & 0x1F)
        name, dims, shape = ahead[2:at], ahead[at], list[int]()
        if ahead[1] & 0xE0 != 0xA0 or dims & 0xF0 != 0x90:
            return None
        at += 1
        for _ in range(dims & 0x0F):
            number, at = _whole(ahead, at)
            shape.append(number)
        if not 0xC4 <= ahead[at] <= 0xC6:
            return None
        end = at + 1 + 2 ** (ahead[at] - 0xC4)
        if end > len(ahead):
            return None
        return Head(name.decode(), shape, int.from_bytes(ahead[at + 1 : end], "big"), ahead[:at], end)
    except (IndexError, ValueError):
        return None


def _whole(ahead: bytes, at: int) -> tuple[int, int]:
    """Return the non-negative whole number at position `at`, and the position after it.

    Raises ValueError if there is none.
    """
    code = ahead[at]
    if code < 0x80:
        return code, at + 1
    if not 0xCC <= code <= 0xCF:
        raise ValueError
    end = at + 1 + 2 ** (code - 0xCC)
    return int.from_bytes(ahead[at + 1 : end], "big"), end
