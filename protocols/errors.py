"""The exceptions that Fleetune raises on purpose.

    FleetuneError ├── SettingError        a key of run.toml or an option of a command is wrong ├── DataError
    a data source is missing, damaged or does not fit the model ├── ModelError          a model cannot be
    built, described, or is not the fleet's model │   └── TrainingDiverged    local training ended in numbers
    that are not finite ├── MethodError         a method's step failed, or returned a value that cannot be
    stored or sent ├── StoreError          state on disk is missing, damaged, or the disk is full │   ├──
    StoreInUse          another process holds the state on disk │   └── StoreVersion        state on disk has
    a format that this program does not read ├── AgentClosed         a program used an Agent after it had
    closed it ├── TransportError      the broker cannot be reached or refuses the connection ├──
    TrainingStopped     local training was asked to stop; nothing was changed ├── ReadingStopped      reading
    a file was asked to stop; nothing of it was taken └── PacketError         the peer sent something invalid
        ├── PacketTruncated     shorter than announced
        ├── PacketVersion       a format that this program does not read
        ├── PacketTooLarge      a length beyond the limit, found before anything is allocated
        ├── PacketCorrupt       checksum or structure is wrong
        ├── PacketNotFinite     NaN or infinite values
        ├── PacketOutlying      finite, but far larger than the model and all others' updates
        ├── PacketOverclaimed   claims more samples than its device reported
        └── PacketForeign       made for another model, run, round or device

The message of each is one line: what is wrong, where, and what to do. A command prints it and exits
with 2; a running coordinator or agent logs it, counts it by class name and goes on.
"""

from typing import Literal, Self

RefusalReason = Literal["login", "client-id", "protocol", "unavailable", "name-taken"]
"""Why a broker refuses a connection. `name-taken`: another client with the same name has connected."""


class FleetuneError(Exception):
    """Base of all exceptions raised on purpose; `str()` is the line that a user reads.

    The line says what is wrong and, after a semicolon, what to do.
    """

    @property
    def found(self) -> str:
        """The part of the message that states what is wrong."""
        return said_and_remedy(str(self))[0]

    @property
    def remedy(self) -> str:
        """The part of the message that states what to do; "" if the message has none."""
        return said_and_remedy(str(self))[1]


def said_and_remedy(line: str) -> tuple[str, str]:
    """Return the two parts of a message: what is wrong, and what to do ("" if the message does not say)."""
    found, _, remedy = line.partition("; ")
    return found, remedy


class SettingError(FleetuneError):
    """A key of run.toml or an option of a command is wrong."""


class DataError(FleetuneError):
    """A data source is missing, damaged or does not fit the model."""


class ModelError(FleetuneError):
    """A model cannot be built or described, or is not the fleet's model."""


class TrainingDiverged(ModelError):  # noqa: N818 - it reports what the model did
    """Local training ended in non-finite numbers; nothing changed."""


class MethodError(FleetuneError):
    """A method's step failed, or returned a value that cannot be stored or sent; the line names the step."""


class StoreError(FleetuneError):
    """State on disk is missing or damaged, or the disk is full."""


class StoreVersion(StoreError):  # noqa: N818 - reads as the verdict on what is stored
    """State on disk has a format that this program does not read. It is left unchanged."""

    @classmethod
    def of(cls, what: object, found: object, reads: object, remedy: str) -> Self:
        """Return the error with the message of `other_format`."""
        return cls(other_format(what, found, reads, remedy))


class StoreInUse(StoreError):  # noqa: N818 - reads as the state it is in
    """Another process holds the state on disk."""


class AgentClosed(FleetuneError):  # noqa: N818 - reads as the state it is in
    """An Agent was used after it was closed, or in another process than the one that made it."""


class TransportError(FleetuneError):
    """The broker is unreachable or refuses the connection.

    Attributes:
        reason: why the broker refuses the connection; None if it does not refuse, or the reason is unknown.
    """

    def __init__(self, line: str, reason: "RefusalReason | None" = None) -> None:
        super().__init__(line)
        self.reason = reason


class TrainingStopped(FleetuneError):  # noqa: N818 - it reports a wish that was granted, not a fault
    """Local training was asked to stop; nothing changed."""


class ReadingStopped(FleetuneError):  # noqa: N818 - as `TrainingStopped`
    """Reading a file was asked to stop; no part of the file was stored."""


class PacketError(FleetuneError):
    """A message or payload from the peer is invalid."""


class PacketTruncated(PacketError):  # noqa: N818 - reads as the verdict on a packet
    """A message or payload is shorter than announced."""


class PacketVersion(PacketError):  # noqa: N818
    """A message or payload has a format that this program does not read."""


class PacketTooLarge(PacketError):  # noqa: N818
    """A length in a message or payload is above its limit."""


class PacketCorrupt(PacketError):  # noqa: N818
    """The checksum or the structure of a message or payload is wrong."""


class PacketNotFinite(PacketError):  # noqa: N818
    """A payload has NaN or infinite values."""


class PacketOutlying(PacketError):  # noqa: N818
    """An update is finite, but far larger than the model and all other updates."""


class PacketOverclaimed(PacketError):  # noqa: N818
    """A device claims more samples than it reported, or scores that the run's task cannot have."""


class PacketForeign(PacketError):  # noqa: N818
    """A message or payload is for another model, run, round or device."""


class ReferenceModelUnknown(PacketForeign):
    """A payload has differences to a model that this side does not have."""


SAME_VERSION = "install the same version of fleetune on the coordinator and its devices"


def other_format(what: object, found: object, reads: object, remedy: str) -> str:
    """Return a message that rejects another format version: both versions, and what to do."""
    return f"{what} has format {found}; this program reads format {reads}: {remedy}"
