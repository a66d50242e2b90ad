"""A small message in its brief form: `VERSION`, which no JSON begins with; the number of the word that its
`type` is; and all else that its JSON has, as `protocols.brief` writes it.
"""

from typing import Any

import msgspec

from fleetune.protocols import brief
from fleetune.protocols.errors import PacketCorrupt

VERSION = 1


def is_brief(data: bytes) -> bool:
    """Whether this is a message in brief form, of any version."""
    return data[:1] < b"\x09" and data != b""  # JSON begins with a brace, or with a tab or another blank


def write(message: msgspec.Struct) -> bytes:
    """A message of `protocols.wire.messages`."""
    content = msgspec.to_builtins(message)
    return bytes((VERSION, brief.number_of(content.pop("type")))) + brief.write(content)


def read(data: bytes) -> dict[str, Any]:
    """The JSON object of a message that `is_brief`.

    Raises:
        PacketCorrupt: it is none, or of another version.
    """
    if data[0] != VERSION:
        raise PacketCorrupt(f"brief message of version {data[0]}; this side reads {VERSION}")
    content = brief.read(data, 2)
    if not isinstance(content, dict) or data[1] >= len(brief.WORDS):
        raise PacketCorrupt("brief message: no map, or of no type")
    return {**content, "type": brief.WORDS[data[1]]}
