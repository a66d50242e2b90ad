"""How much a MessagePack body holds, counted before any of it becomes an object.

A million empty maps are a megabyte, and 64 times that as objects; a list in a list in a list ... breaks
whoever reads it by recursion. Format: github.com/msgpack/msgpack/blob/master/spec.md.
"""

from fleetune.protocols.errors import PacketCorrupt, PacketTooLarge

MAX_DEPTH = 32

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


def check_elements(body: bytes, most: int) -> None:
    """Whether `body` is one MessagePack value of at most `most` elements, keys counted, and no deeper than
    `MAX_DEPTH`. The time it takes is bounded by `most`.

    Raises:
        PacketTooLarge: it holds more, or is deeper.
        PacketCorrupt: it is cut short, or goes on behind its end.
    """
    at, count, waiting = 0, 0, [1]  # elements that are still to come, level by level
    while waiting:
        if not waiting[-1]:
            waiting.pop()
            continue
        waiting[-1] -= 1
        count += 1
        if count > most or len(waiting) > MAX_DEPTH:
            raise PacketTooLarge(f"packet of more than {most} elements, or more than {MAX_DEPTH} levels deep")
        at, held = _step(body, at)
        if held > len(body) - at:  # each takes a byte at least
            raise PacketCorrupt(f"packet says that {held} elements follow on {len(body) - at} bytes")
        if held:
            waiting.append(held)
    if at != len(body):
        raise PacketCorrupt(f"packet goes on for {len(body) - at} bytes behind its end")


def _step(body: bytes, at: int) -> tuple[int, int]:
    """Behind the element that starts at `at`, and how many it holds; what it holds comes next."""
    if at >= len(body):
        raise PacketCorrupt("packet ends in the middle of a value")
    code, at = body[at], at + 1
    if code < 0x80 or code >= 0xE0 or 0xC0 <= code <= 0xC3:
        return at, 0
    if code < 0xA0:
        return at, code & 0x0F if code >= 0x90 else 2 * (code & 0x0F)
    if code < 0xC0:
        return at + (code & 0x1F), 0
    if code in _FIXED:
        return at + _FIXED[code], 0
    width, more = _SIZED.get(code) or _HOLDING[code]
    length = int.from_bytes(body[at : at + width], "big")
    if code in _SIZED:
        return at + width + length + more, 0
    return at + width, length * more
