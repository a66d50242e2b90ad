"""A MessagePack body walked element by element: arrays are taken out on the way, everything is counted.

A million empty maps are a megabyte, and 64 times that as objects; a list in a list in a list ... breaks
whoever reads it by recursion; and an array read with the rest would be there twice. Format:
github.com/msgpack/msgpack/blob/master/spec.md.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from fleetune.protocols.errors import PacketCorrupt, PacketTooLarge
from fleetune.protocols.update.body import STEP, Body

MAX_DEPTH = 32
PLACE = 0x46  # the type of the extension, a number of 4 bytes, that stands where an array was

_FIXED = {  # code: bytes of the value behind it
    0xCA: 4,
    0xCB: 8,
    **{0xCC + n: 2**n for n in range(4)},
    **{0xD0 + n: 2**n for n in range(4)},
    **{0xD4 + n: 1 + 2**n for n in range(5)},
}
_SIZED = {  # code: bytes of the length behind it, and bytes more than that length
    **{0xC4 + n: (2**n, 0) for n in range(3)},
    **{0xC7 + n: (2**n, 1) for n in range(3)},
    **{0xD9 + n: (2**n, 0) for n in range(3)},
}
_HOLDING = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}  # bytes of the length, elements each
_TYPE_AT = {0xC7: 2, 0xC8: 3, 0xC9: 5, **{0xD4 + n: 1 for n in range(5)}}  # of an extension
_LONGEST_START = 6  # of an element: its code, a length, and the type of an extension
_LONGEST_HEAD = 192  # a text of 31 bytes, 15 numbers of 9, and three lengths take less

T = TypeVar("T")


@dataclass(frozen=True)
class Head:
    """What stands before the data of an array: [name, shape, data].

    Attributes:
        name: the dtype, or the encoding of a patch's values.
        shape: as it says.
        length: of the data, in bytes.
        text: the bytes of name and shape, those of the list around them included.
        size: of all that stands before the data, in bytes.
    """

    name: str
    shape: list[int]
    length: int
    text: bytes
    size: int


def without_arrays(
    body: Body,
    lift: Callable[[Head, Body], T | None],
    *,
    most: int | None = None,
    most_bytes: int | None = None,
) -> tuple[bytes, list[T]]:
    """The one value that `body` is, with `PLACE` and a number where each array's data were; and what `lift`
    made of these, by number. The time it takes is bounded by `most` and the bytes of the body.

    Args:
        body: from its front.
        lift: given what stands before an array's data, passes these in the body; None: it did not, and they
            are kept as they are.
        most: elements, keys counted; None: any number.
        most_bytes: of what is not lifted; None: any number.

    Raises:
        PacketTooLarge: it holds more, or is deeper than `MAX_DEPTH` where `most` is given.
        PacketCorrupt: it is cut short, or goes on behind its end.
    """
    kept, lifted = _Kept(body, most_bytes), list[T]()
    count, waiting = 0, [1]  # elements that are still to come, level by level
    while waiting:
        if not waiting[-1]:
            waiting.pop()
            continue
        waiting[-1] -= 1
        head = _head(body)
        count += 1 if head is None else 4 + len(head.shape)
        if most is not None and (count > most or len(waiting) > MAX_DEPTH):
            raise PacketTooLarge(f"packet of more than {most} elements, or more than {MAX_DEPTH} levels deep")
        if head is not None:
            _lift(head, lift, kept, lifted)
        elif held := kept.element():
            waiting.append(held)
    if body.at != body.num_bytes:
        raise PacketCorrupt(f"packet goes on for {body.num_bytes - body.at} bytes behind its end")
    return bytes(kept.data), lifted


@dataclass
class _Kept:
    """What stays of `body` as it is: `data`, at most `most` bytes."""

    body: Body
    most: int | None
    data: bytearray = field(default_factory=bytearray)

    def element(self) -> int:
        """Keep the next element, without those that it holds; how many these are."""
        size, held = _extent(self.body.peek(_LONGEST_START))
        self.pass_on(size)
        if held > self.body.num_bytes - self.body.at:  # each takes a byte at least
            raise PacketCorrupt(f"packet says that {held} elements follow on fewer bytes")
        return held

    def pass_on(self, size: int) -> None:
        """Keep the next bytes."""
        if self.most is not None and len(self.data) + size > self.most:
            raise PacketTooLarge(f"packet of more than {self.most} bytes besides its arrays")
        for start in range(0, size, STEP):
            self.data += self.body.read(min(STEP, size - start))


def _lift(head: Head, lift: Callable[[Head, Body], T | None], kept: _Kept, lifted: list[T]) -> None:
    """Pass an array in the body."""
    before = kept.body.read(head.size)
    found = lift(head, kept.body)
    if found is None:
        kept.data += before
        kept.pass_on(head.length)
    else:
        kept.data += head.text + bytes([0xD6, PLACE]) + len(lifted).to_bytes(4, "big")
        lifted.append(found)


def _extent(first: bytes) -> tuple[int, int]:
    """How long the element is that begins with these bytes, without what it holds, and how many this is."""
    if not first:
        raise PacketCorrupt("packet ends in the middle of a value")
    code = first[0]
    if code < 0x80 or code >= 0xE0 or 0xC0 <= code <= 0xC3:
        return 1, 0
    if code < 0xA0:
        return 1, code & 0x0F if code >= 0x90 else 2 * (code & 0x0F)
    if code < 0xC0:
        return 1 + (code & 0x1F), 0
    type_at = _TYPE_AT.get(code)
    if type_at is not None and first[type_at : type_at + 1] == bytes([PLACE]):
        raise PacketCorrupt(f"packet with an extension of type {PLACE}, which none may hold")
    if code in _FIXED:
        return 1 + _FIXED[code], 0
    width, more = _SIZED.get(code) or _HOLDING[code]
    length = int.from_bytes(first[1 : 1 + width], "big")
    if code in _SIZED:
        return 1 + width + length + more, 0
    return 1 + width, length * more


def _head(body: Body) -> Head | None:
    """What comes next, if that is [text, [whole numbers], bytes]; nothing is passed."""
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
    """The whole number from 0 at this place, and where it ends. Raises ValueError: there is none."""
    code = ahead[at]
    if code < 0x80:
        return code, at + 1
    if not 0xCC <= code <= 0xCF:
        raise ValueError
    end = at + 1 + 2 ** (code - 0xCC)
    return int.from_bytes(ahead[at + 1 : end], "big"), end
