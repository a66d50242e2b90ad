"""Messages between an `Agent` and its child process, one line of JSON each."""

from typing import Any

import msgspec

from fleetune.edge_agent.run.activity import Activity

STOP = b"stop\n"


class Start(msgspec.Struct):
    """The first line for the child. The only other command is `STOP`.

    Attributes:
        options: fields of `RunOptions`, with the broker's password. In a pipe, no list of processes shows it.
        lock: file handle of the lock on the state folder.
        output: file handle to which the child writes its messages.
    """

    options: dict[str, Any]
    lock: int
    output: int


class Ready(msgspec.Struct, tag="ready"):
    """Message: the child has checked everything that can be checked, and is connecting."""


class Failed(msgspec.Struct, tag="failed"):
    """Message: the child ends because of an error.

    Attributes:
        kind: name of the error's class in `protocols.errors`.
        line: its message.
    """

    kind: str
    line: str


class ActivityReport(msgspec.Struct, tag="now"):
    """Message: the agent's present activity."""

    activity: Activity


class LogLine(msgspec.Struct, tag="said"):
    """Message: a line of the child's log."""

    level: int
    logger: str
    line: str


class Ended(msgspec.Struct, tag="ended"):
    """Message: the child has ended without a stop command. The parent creates this message itself."""

    line: str


ChildMessage = Ready | Failed | ActivityReport | LogLine | Ended


def encode(message: ChildMessage | Start) -> bytes:
    """Encode a message as one line."""
    return msgspec.json.encode(message, enc_hook=str) + b"\n"


def read_message(line: bytes) -> ChildMessage:
    """Decode a line of the child. Raises msgspec.MsgspecError: it is not a valid message."""
    message: ChildMessage = msgspec.json.decode(line, type=ChildMessage)
    return message
