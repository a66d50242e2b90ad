"""The control messages, as JSON (readable with any MQTT client) or in the compact form.

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
    Pem,
    RunId,
    Share,
    Words,
)
from fleetune.protocols.errors import SAME_VERSION, PacketCorrupt, PacketTooLarge, PacketVersion, other_format
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.one_line import flat
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.wire.capabilities import Capabilities
from fleetune.protocols.wire.compact_message import CompactForm, CompactReader, is_compact
from fleetune.protocols.wire.identity import DisplayName

VERSION = 1
MAX_CONTROL_BYTES = 16_384
MAX_AWAY_S = 3600.0
M = TypeVar("M")


class Message(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base class of messages. In JSON, the field `type` holds the class name."""


class Presence(Message, frozen=True):
    """Retained message on `state`: reports whether the agent is connected, and introduces the agent.

    Attributes:
        online: True if it is connected.
        instance: id of the agent's process, new at each start.
        agent: program and version.
        version: version of the messages that it uses. A coordinator refuses other versions than its own.
        name: the device's name for people; omitted if it is the device's id.
        reads: formats that the agent reads; omitted by an agent that reads only the minimum.
    """

    online: bool
    instance: Nonce
    agent: Words = ""
    version: Number = VERSION
    name: DisplayName | UnsetType = UNSET
    reads: Capabilities | UnsetType = UNSET


class TransferKey(Struct, frozen=True):
    """Identifies the purpose of a payload.

    Round and attempt are 0 for an enrolment, a bundle and a backbone. `final_evaluation` marks the final
    evaluation (see `protocols.method.method.Round`).
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
    def words(self) -> str:
        """The round in words, for log lines."""
        return "final evaluation" if self.final_evaluation else f"round {self.round}"

    @property
    def update(self) -> "TransferKey":
        """Key of the update that answers this task."""
        return TransferKey("update", self.run, self.round, self.attempt, self.final_evaluation)


class Offer(Message, frozen=True, omit_defaults=True):
    """Sent by either side: offers a payload.

    `transfer` has 32 hex digits. The same payload under the same transfer key has the same id in every offer.
    `digest` is the payload's BLAKE2b-128 digest in 32 hex digits. `ratio` comes with an enrolment: it is the
    largest ratio that the run assigns to this device ([fleet] ratios).
    """

    transfer: Digest
    digest: Digest
    num_bytes: NumBytes
    transfer_key: TransferKey = field(name="errand")
    ratio: Annotated[float, Meta(gt=0, le=1)] | None = None


class Resume(Message, frozen=True):
    """Sent by the receiver: asks for the payload from this offset on; everything before it is on disk."""

    transfer: Digest
    offset: NumBytes


class Ack(Message, frozen=True):
    """Sent by the receiver: everything before this offset has arrived.

    At the end of the payload, it also means that the payload is verified and on disk.
    """

    transfer: Digest
    offset: NumBytes


class Refuse(Message, frozen=True):
    """Sent by the receiver: rejects this payload."""

    transfer: Digest
    reason: Words


class Fetch(Message, frozen=True, omit_defaults=True):
    """Sent by a device: asks for the run's bundle (to train without torch) or backbone (the frozen part).

    The answer is an offer of the payload. If the run has no bundle, the answer is `Lacking`.
    """

    run: RunId
    what: Literal["bundle", "backbone"] = "bundle"


class Lacking(Message, frozen=True):
    """Sent by the coordinator: this run has no bundle."""

    run: RunId
    reason: Words


class Ready(Message, frozen=True):
    """Sent by a device: it is enrolled in this run and can take part.

    `base` is the digest of the model that the device has (`protocols.update.reference_model`), if tasks are
    differences to that model.
    """

    run: RunId
    model_hash: ModelHash
    report: DeviceReport
    base: Digest | UnsetType = UNSET


class Working(Message, frozen=True):
    """Sent by a device from time to time: its activity, for the live view. `progress` is 0..1.

    Fleetune's own agent reports only "training". "evaluating" is reserved for other agents.
    """

    run: RunId
    round: Number
    stage: Literal["training", "evaluating"]
    progress: Share = 0.0


class Measured(Message, frozen=True):
    """Sent by a device before it offers its reply: the actual and the predicted cost of its work."""

    run: RunId
    round: Number
    attempt: Number
    actual: RoundCost
    predicted: RoundCost = RoundCost()


class Decline(Message, frozen=True):
    """Sent by a device: declines this round (round 0: declines to join this run).

    `diverged`: training produced non-finite numbers; the model may be the reason.
    """

    run: RunId
    round: Number
    attempt: Number
    reason: Words
    diverged: bool = False


class Finish(Message, frozen=True):
    """Sent by the coordinator: this run is over; the device waits for the next run. Answered by `Left`."""

    run: RunId
    reason: Words


class Left(Message, frozen=True):
    """Sent by a device: it knows that this run is over."""

    run: RunId


class NotAdmitted(Message, frozen=True):
    """Sent by the coordinator: this run does not admit the device, because its agent lacks a needed feature.

    The coordinator checks again when the device connects again.
    """

    run: RunId
    reason: Words


class NameTaken(Message, frozen=True):
    """Coordinator: another device uses the same name; the agent must disconnect for `wait_s` seconds.

    The message addresses the agent with this `instance`; another agent ignores it.
    """

    instance: Nonce
    wait_s: Annotated[float, Meta(ge=0, le=MAX_AWAY_S)]


class Ping(Message, frozen=True):
    """Either side: asks for a `Pong`.

    A device that tests its access rights sends one on each channel that it may write, always as JSON. The
    coordinator answers each by a `Pong` on `task`, `down` and `probe`.
    """

    nonce: Nonce


class Pong(Message, frozen=True):
    """Either side: answers the `Ping` with this nonce."""

    nonce: Nonce


class RenewalDue(Message, frozen=True):
    """Sent by the coordinator: asks for a `Renew`, because the device's certificate is to be replaced."""


class Renew(Message, frozen=True):
    """Sent by a device: asks for certificates for a new key; `signing_request` as in a `JoinRequest`."""

    signing_request: Pem


class Renewed(Message, frozen=True):
    """Sent by the coordinator: the new certificates of a device, as in `Joined`."""

    certificate: Pem
    probe_certificate: Pem
    authority: Pem


FromDevice = (
    Presence
    | Offer
    | Resume
    | Ack
    | Refuse
    | Fetch
    | Ready
    | Working
    | Measured
    | Decline
    | Left
    | Pong
    | Renew
)
ToDevice = (
    Offer | Resume | Ack | Refuse | Lacking | Finish | NotAdmitted | NameTaken | Ping | RenewalDue | Renewed
)

_from_device: msgspec.json.Decoder[FromDevice] = msgspec.json.Decoder(FromDevice)
_to_device: msgspec.json.Decoder[ToDevice] = msgspec.json.Decoder(ToDevice)
_compact = CompactForm(  # the order is part of the compact format: docs/wire.md
    (
        *(Offer, Resume, Ack, Refuse, Fetch, Lacking, Ready),
        *(Working, Measured, Decline, Finish, Left, Ping, Pong),
    )
)
_compact_from_device: CompactReader[FromDevice] = _compact.reader(get_args(FromDevice))
_compact_to_device: CompactReader[ToDevice] = _compact.reader(get_args(ToDevice))


class _AnyPresence(Struct):
    """The fields of an agent's `Presence` that are read before its version is known."""

    agent: str = ""
    version: int = 0


_any_presence = msgspec.json.Decoder(_AnyPresence)
_ping: msgspec.json.Decoder[Ping] = msgspec.json.Decoder(Ping)
_pong: msgspec.json.Decoder[Pong] = msgspec.json.Decoder(Pong)


def encode(message: Message, *, compact: bool = False) -> bytes:
    """Encode a message as JSON or in the compact form."""
    return _compact.write(message) if compact else msgspec.json.encode(message)


def readable(text: str) -> str:
    """Make a peer's text safe for a log or a message: one printable line of limited length."""
    words = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return words if len(words) <= MAX_WORDS else f"{words[:MAX_WORDS]}..."


def read_from_device(data: bytes) -> FromDevice:
    """Decode a device's message. Raises PacketVersion, PacketTooLarge or PacketCorrupt."""
    if data.startswith(b'{"type":"Presence"') and len(data) <= MAX_CONTROL_BYTES:
        _check_version(data)
    return _read(_from_device, data, _compact_from_device)


def _check_version(presence: bytes) -> None:
    """Raise PacketVersion if an agent of another version wrote this presence."""
    with suppress(msgspec.DecodeError):  # the caller then rejects it as damaged
        found = _any_presence.decode(presence)
        if found.version != VERSION:
            what = f"the message of agent {readable(found.agent) or 'without a name'}"
            raise PacketVersion(other_format(what, found.version, VERSION, SAME_VERSION))


def read_to_device(data: bytes) -> ToDevice:
    """Decode a coordinator's message. Raises PacketTooLarge or PacketCorrupt."""
    return _read(_to_device, data, _compact_to_device)


def read_ping(data: bytes) -> Ping | None:
    """Decode a `Ping` from any channel; None if the data are something else."""
    return _read_if(_ping, b'{"type":"Ping"', data)


def read_pong(data: bytes) -> Pong | None:
    """Decode a `Pong` from any channel; None if the data are something else."""
    return _read_if(_pong, b'{"type":"Pong"', data)


def _read_if(decoder: msgspec.json.Decoder[M], beginning: bytes, data: bytes) -> M | None:
    """Decode data that start with `beginning`. No chunk does, because its first 16 bytes are a hash."""
    if not data.startswith(beginning):
        return None
    try:
        return _read(decoder, data)
    except (PacketCorrupt, PacketTooLarge):
        return None


def _read(decoder: msgspec.json.Decoder[M], data: bytes, compact: CompactReader[M] | None = None) -> M:
    if len(data) > MAX_CONTROL_BYTES:
        raise PacketTooLarge(f"control message of {len(data)} bytes; at most {MAX_CONTROL_BYTES} are allowed")
    try:
        if compact is not None and is_compact(data):
            return compact.read(data)
        return decoder.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as problem:
        raise PacketCorrupt(f"control message: {flat(problem)}") from None
