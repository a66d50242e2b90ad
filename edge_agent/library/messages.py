"""What an Agent and its child process say to each other, a line of JSON each."""

from typing import Any

import msgspec

from fleetune.edge_agent.run.activity import Activity

STOP = b"stop\n"


class Start(msgspec.Struct):
    """The first line that the child is given; `STOP` is the other one.

    Attributes:
        options: of `RunOptions`, the broker's password among them: it stands in no list of processes.
        lock: file handle by which the state folder is held.
        words: file handle to write to.
    """

    options: dict[str, Any]
    lock: int
    words: int


class Ready(msgspec.Struct, tag="ready"):
    """All that can be checked is right; it connects."""


class Failed(msgspec.Struct, tag="failed"):
    """It ends, by its owner's mistake: the name of a class in `protocols.errors`, and its line."""

    kind: str
    line: str


class ActivityReport(msgspec.Struct, tag="now"):
    """What it is at."""

    activity: Activity


class LogLine(msgspec.Struct, tag="said"):
    """A line of its log."""

    level: int
    logger: str
    line: str


class Ended(msgspec.Struct, tag="ended"):
    """The process has ended unasked, and why; its parent says so to itself."""

    line: str


ChildMessage = Ready | Failed | ActivityReport | LogLine | Ended


def encode(message: ChildMessage | Start) -> bytes:
    """A line."""
    return msgspec.json.encode(message, enc_hook=str) + b"\n"


def read_message(line: bytes) -> ChildMessage:
    """Raises msgspec.MsgspecError: it is none."""
    word: ChildMessage = msgspec.json.decode(line, type=ChildMessage)
    return word
