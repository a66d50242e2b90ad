"""A decoder of docs/wire.md's compact form in plain Python, written from that page, without the product."""

import struct
from pathlib import Path
from typing import Any

import zstandard

PAGE = Path(__file__).parents[2] / "docs" / "wire.md"
SECTION = PAGE.read_text().partition("\n## Compact")[2].partition("\n## ")[0]
TABLE = [line.split("|")[1:4] for line in SECTION.splitlines() if line.startswith("|") and "`" in line]
NUMBERS = {int(number): name.strip(" `") for number, name, _ in TABLE if number.strip().isdigit()}
FIELDS = {name.strip(" `"): fields.split() for _, name, fields in TABLE}
FORMS = {0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q"}
FORMS |= {0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


def message(data: bytes) -> dict[str, Any]:
    """The JSON object that a compact message stands for, without its defaults."""
    (number, *values), end = value(data, 0)
    if end != len(data):
        raise ValueError("something behind the end")
    return {"type": NUMBERS[number], **named(NUMBERS[number], values)}


def named(name: str, values: list[Any]) -> dict[str, Any]:
    """The values of a row of the table by their names; a name in capitals behind a colon is a row too."""
    found = {}
    for field, one in zip(FIELDS[name], values, strict=False):
        key, _, row = field.partition(":")
        if one is not None:
            found[key] = named(row, one) if row else one
    return found


def payload(data: bytes, dictionary: bytes) -> tuple[str, Any]:
    """The model's hash, and the body of a payload of version 4; arrays as they are."""
    if data[:5] != b"FLTN\x04":
        raise ValueError("not such a payload")
    own = zstandard.ZstdCompressionDict(dictionary, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    body = zstandard.ZstdDecompressor(dict_data=own).decompress(data[17:])
    content, end = value(body, 0)
    if end != len(body):
        raise ValueError("something behind the end")
    return data[5:13].hex(), content


def value(data: bytes, at: int) -> tuple[Any, int]:  # noqa: PLR0911 - one for each kind of code
    """The MessagePack value at this place, and where it ends."""
    code, at = data[at], at + 1
    if code < 0x80 or code >= 0xE0:
        return code - 256 * (code >= 0xE0), at
    if code < 0xA0:
        return holding(data, at, code & 15, code < 0x90)
    if code < 0xC0 or 0xD9 <= code <= 0xDB:
        length, at = (code & 31, at) if code < 0xC0 else number_at(data, at, 2 ** (code - 0xD9))
        return data[at : at + length].decode(), at + length
    if code in CONSTANTS:
        return CONSTANTS[code], at
    if code in FORMS:
        (found,) = struct.unpack_from(FORMS[code], data, at)
        return found, at + struct.calcsize(FORMS[code])
    if 0xC4 <= code <= 0xC6:
        length, at = number_at(data, at, 2 ** (code - 0xC4))
        return data[at : at + length], at + length
    length, at = number_at(data, at, 2 if code in (0xDC, 0xDE) else 4)
    return holding(data, at, length, code >= 0xDE)


def number_at(data: bytes, at: int, width: int) -> tuple[int, int]:
    """A length of so many bytes, and where it ends."""
    return int.from_bytes(data[at : at + width], "big"), at + width


def holding(data: bytes, at: int, length: int, is_map: bool) -> tuple[Any, int]:
    """A map or a list of so many, and where it ends."""
    found: list[Any] = []
    for _ in range(length * (1 + is_map)):
        one, at = value(data, at)
        found.append(one)
    return (dict(zip(found[::2], found[1::2], strict=True)) if is_map else found), at
