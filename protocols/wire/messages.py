"""The control messages, as JSON (an engineer may watch them with any MQTT client) or in the compact form.

Payloads (enrolment, bundle, backbone, task, update) travel as a transfer: `Offer` -> `Resume` -> chunks, each
answered by `Ack`; see transfer.py. A chunk is binary: 16 bytes transfer id, 8 bytes offset little endian,
data.
"""

from contextlib import suppress
from typing import Annotated, Literal, TypeVar, get_args

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

from fleetune.protocols.bounds import (
    MAX_WORDS,
    Digest,
    ModelHash,
    Nonce,
    Number,
    NumBytes,
    RunId,
    Share,
    Words,
)
from fleetune.protocols.errors import SAME_VERSION, PacketCorrupt, PacketTooLarge, PacketVersion, other_format
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.one_line import flat
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.wire.compact_message import CompactForm, CompactReader, is_compact

VERSION = 1
MAX_CONTROL_BYTES = 16_384
MAX_AWAY_S = 3600.0
M = TypeVar("M")


class Message(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base: the class name stands in the JSON as `type`."""


class Presence(Message, frozen=True):
    """Retained on `state`: whether the agent is there. `instance` is new at every start of the agent.

    `version`: of the messages that the agent writes and reads. A coordinator of another version refuses it.
    """

    online: bool
    instance: Nonce
    agent: Words = ""
    version: Number = VERSION


class TransferKey(Struct, frozen=True):
    """What a payload is for. For an enrolment, a bundle and a backbone, round and attempt are 0.

    `final_evaluation` marks the closing evaluation (see `protocols.method.method.Round`).
    """

    kind: Literal["enrolment", "bundle", "backbone", "task", "update"]
    run: RunId
    round: Number = 0
    attempt: Number = 0
    final_evaluation: bool = field(default=False, name="rehearsal")

    @property
    def round_attempt(self) -> tuple[int, int]:
        """Round and attempt; later ones are greater."""
        return self.round, self.attempt

    @property
    def update(self) -> "TransferKey":
        """Of the update that answers this task."""
        return TransferKey("update", self.run, self.round, self.attempt, self.final_evaluation)


class Offer(Message, frozen=True, omit_defaults=True):
    """Sender: I have a payload. `transfer` is 32 hex digits: the same payload for the same transfer key has
    the same id, on every offer; `digest` is BLAKE2b-128 of the payload as 32 hex digits. `ratio` comes with
    an enrolment: the run deals this device no larger one ([fleet] ratios).
    """

    transfer: Digest
    digest: Digest
    num_bytes: NumBytes
    transfer_key: TransferKey = field(name="errand")
    ratio: Annotated[float, Meta(gt=0, le=1)] | None = None


class Resume(Message, frozen=True):
    """Receiver: send from this offset on (all of it: I have it, and it is on disk)."""

    transfer: Digest
    offset: NumBytes


class Ack(Message, frozen=True):
    """Receiver: I have everything before this offset; at the end: complete, verified and on disk."""

    transfer: Digest
    offset: NumBytes


class Refuse(Message, frozen=True):
    """Receiver: I do not take this payload."""

    transfer: Digest
    reason: Words


class Fetch(Message, frozen=True, omit_defaults=True):
    """Device: send me the run's bundle, I train without torch; or its backbone, what is frozen in its model.
    Answered by its offer, or, of a bundle, by `Lacking`.
    """

    run: RunId
    what: Literal["bundle", "backbone"] = "bundle"


class Lacking(Message, frozen=True):
    """Coordinator: this run has no bundle."""

    run: RunId
    reason: Words


class Ready(Message, frozen=True):
    """Device: enrolled in this run.

    `base`: digest of what it holds of the model (`protocols.update.base`), where tasks are differences to it.
    """

    run: RunId
    model_hash: ModelHash
    report: DeviceReport
    base: Digest | UnsetType = UNSET


class Working(Message, frozen=True):
    """Device, now and then: what it is doing, for the live view. `progress` is 0..1.

    Our own agent tells "training" alone; "evaluating" is reserved for agents that tell that too.
    """

    run: RunId
    round: Number
    stage: Literal["training", "evaluating"]
    progress: Share = 0.0


class Measured(Message, frozen=True):
    """Device, before it offers its reply: what its work took, and what it had expected of the round."""

    run: RunId
    round: Number
    attempt: Number
    actual: RoundCost
    predicted: RoundCost = RoundCost()


class Decline(Message, frozen=True):
    """Device: I will not do this round (round 0: I will not join this run).

    `diverged`: training ended in numbers that are not finite; the model may be the reason.
    """

    run: RunId
    round: Number
    attempt: Number
    reason: Words
    diverged: bool = False


class Finish(Message, frozen=True):
    """Coordinator: this run is over; stay for the next one. Answered by `Left`."""

    run: RunId
    reason: Words


class Left(Message, frozen=True):
    """Device: I know that this run is over."""

    run: RunId


class NameTaken(Message, frozen=True):
    """Coordinator: another device uses your name; leave the broker for `wait_s`. It is for the agent whose
    `instance` this is; another one that reads it goes on.
    """

    instance: Nonce
    wait_s: Annotated[float, Meta(ge=0, le=MAX_AWAY_S)]


class Ping(Message, frozen=True):
    """Either side: are you there?

    A device that tests its access rights sends one on each channel that it may write, always as JSON. The
    coordinator answers each by a `Pong` on `task`, `down` and `probe`.
    """

    nonce: Nonce


class Pong(Message, frozen=True):
    """I am there: the answer to the `Ping` of this nonce."""

    nonce: Nonce


FromDevice = (
    Presence | Offer | Resume | Ack | Refuse | Fetch | Ready | Working | Measured | Decline | Left | Pong
)
ToDevice = Offer | Resume | Ack | Refuse | Lacking | Finish | NameTaken | Ping

_from_device: msgspec.json.Decoder[FromDevice] = msgspec.json.Decoder(FromDevice)
_to_device: msgspec.json.Decoder[ToDevice] = msgspec.json.Decoder(ToDevice)
_compact = CompactForm(  # the order is the format: docs/wire.md
    (
        *(Offer, Resume, Ack, Refuse, Fetch, Lacking, Ready),
        *(Working, Measured, Decline, Finish, Left, Ping, Pong),
    )
)
_compact_from_device: CompactReader[FromDevice] = _compact.reader(get_args(FromDevice))
_compact_to_device: CompactReader[ToDevice] = _compact.reader(get_args(ToDevice))


class _AnyPresence(Struct):
    """All that is read of an agent's `Presence` before its version is known."""

    agent: str = ""
    version: int = 0


_any_presence = msgspec.json.Decoder(_AnyPresence)
_ping: msgspec.json.Decoder[Ping] = msgspec.json.Decoder(Ping)
_pong: msgspec.json.Decoder[Pong] = msgspec.json.Decoder(Pong)


def encode(message: Message, *, compact: bool = False) -> bytes:
    """As JSON, or in the compact form."""
    return _compact.write(message) if compact else msgspec.json.encode(message)


def readable(text: str) -> str:
    """A peer's words, or words for one, as they may stand in a log: one line, printable, not long."""
    words = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return words if len(words) <= MAX_WORDS else f"{words[:MAX_WORDS]}..."


def read_from_device(data: bytes) -> FromDevice:
    """Raises PacketVersion, PacketTooLarge or PacketCorrupt."""
    if data.startswith(b'{"type":"Presence"') and len(data) <= MAX_CONTROL_BYTES:
        _check_version(data)
    return _read(_from_device, data, _compact_from_device)


def _check_version(presence: bytes) -> None:
    """Raises PacketVersion: an agent of another version wrote it."""
    with suppress(msgspec.DecodeError):  # it is refused as damaged
        found = _any_presence.decode(presence)
        if found.version != VERSION:
            what = f"the message of agent {readable(found.agent) or 'without a name'}"
            raise PacketVersion(other_format(what, found.version, VERSION, SAME_VERSION))


def read_to_device(data: bytes) -> ToDevice:
    """Raises PacketTooLarge or PacketCorrupt."""
    return _read(_to_device, data, _compact_to_device)


def read_ping(data: bytes) -> Ping | None:
    """The `Ping` that came on any channel; None: it is something else."""
    return _read_if(_ping, b'{"type":"Ping"', data)


def read_pong(data: bytes) -> Pong | None:
    """The `Pong` that came on any channel; None: it is something else."""
    return _read_if(_pong, b'{"type":"Pong"', data)


def _read_if(decoder: msgspec.json.Decoder[M], beginning: bytes, data: bytes) -> M | None:
    """No chunk begins like that: its first 16 bytes are a hash."""
    if not data.startswith(beginning):
        return None
    try:
        return _read(decoder, data)
    except (PacketCorrupt, PacketTooLarge):
        return None


def _read(decoder: msgspec.json.Decoder[M], data: bytes, compact: CompactReader[M] | None = None) -> M:
    if len(data) > MAX_CONTROL_BYTES:
        raise PacketTooLarge(f"control message of {len(data)} bytes; at most {MAX_CONTROL_BYTES}")
    try:
        if compact is not None and is_compact(data):
            return compact.read(data)
        return decoder.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as problem:
        raise PacketCorrupt(f"control message: {flat(problem)}") from None
