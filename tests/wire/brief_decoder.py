"""A decoder of docs/wire.md's brief form in plain Python, written from that page, without the product."""

import struct
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "wire.md"
WORDS = PAGE.read_text().partition("## Brief")[2].partition("```\n")[2].partition("```")[0].split()
NUMBERS = {0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q"}
NUMBERS |= {0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
EXTENSIONS = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}


def message(data: bytes) -> dict[str, Any]:
    """The JSON object that a brief message stands for."""
    if data[0] != 1:
        raise ValueError("another version")
    content, end = value(data, 2)
    if end != len(data):
        raise ValueError("something behind the end")
    return {"type": WORDS[data[1]], **content}


def payload(data: bytes) -> tuple[str, Any]:
    """The model's hash, and the body of a payload of version 2 that is not compressed; arrays as they are."""
    if data[:6] != b"FLTN\x02\x00":
        raise ValueError("not such a payload")
    content, end = value(data, 18)
    if end != len(data):
        raise ValueError("something behind the end")
    return data[6:14].hex(), content


def value(data: bytes, at: int) -> tuple[Any, int]:  # noqa: PLR0911 - one for each kind of code
    """What stands at this place, and where it ends."""
    code, at = data[at], at + 1
    if code < 0x80 or code >= 0xE0:
        return code - 256 * (code >= 0xE0), at
    if code < 0xA0:
        return holding(data, at, code & 15, code < 0x90)
    if code < 0xC0 or 0xD9 <= code <= 0xDB:
        length, at = (code & 31, at) if code < 0xC0 else number(data, at, 2 ** (code - 0xD9))
        return data[at : at + length].decode(), at + length
    if code in CONSTANTS:
        return CONSTANTS[code], at
    if code in NUMBERS:
        (found,) = struct.unpack_from(NUMBERS[code], data, at)
        return float(f"{found:.6g}") if code == 0xCA else found, at + struct.calcsize(NUMBERS[code])
    if code in EXTENSIONS:
        inside = data[at + 1 : at + 1 + EXTENSIONS[code]]
        return WORDS[inside[0]] if data[at] == 1 else inside.hex(), at + 1 + len(inside)
    if 0xC4 <= code <= 0xC6:
        length, at = number(data, at, 2 ** (code - 0xC4))
        return data[at : at + length], at + length
    length, at = number(data, at, 2 if code in (0xDC, 0xDE) else 4)
    return holding(data, at, length, code >= 0xDE)


def number(data: bytes, at: int, width: int) -> tuple[int, int]:
    """A length of so many bytes, and where it ends."""
    return int.from_bytes(data[at : at + width], "big"), at + width


def holding(data: bytes, at: int, length: int, is_map: bool) -> tuple[Any, int]:
    """A map or a list of so many, and where it ends."""
    found: list[Any] = []
    for _ in range(length * (1 + is_map)):
        one, at = value(data, at)
        found.append(one)
    if not is_map:
        return found, at
    names = [WORDS[key] if isinstance(key, int) else key for key in found[::2]]
    return dict(zip(names, found[1::2], strict=True)), at
