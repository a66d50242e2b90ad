"""Received replies: decoding them, and their data until they are stored."""

from dataclasses import dataclass, replace
from typing import Any

from msgspec import UNSET

from fleetune.coordinator.rounds.engine_state import Member, RoundAttempt
from fleetune.coordinator.rounds.records import DeviceRound
from fleetune.coordinator.tasks.downlink import Delivered
from fleetune.protocols.errors import PacketForeign
from fleetune.protocols.method.choice import LOCAL_WORKS
from fleetune.protocols.method.method import DeviceId, Method
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.update import codec
from fleetune.protocols.update.reference_model import ReferenceModel
from fleetune.protocols.update.shared_payload_cache import DecodeCache, PayloadContent
from fleetune.protocols.wire.payloads import Measures, Reply


@dataclass
class ArrivingReply:
    """An accepted reply, between its arrival and its place in the round. Only `forget_values` changes it.

    Attributes:
        reply: the decoded reply.
        data: the encoded reply.
        delivered: the task as the device received it; None if no longer known, or not needed.
        actual: measured cost of the round on the device.
        predicted: cost of the round as the device predicted it.
        staleness: number of aggregations by which its reference model is older than the newest.
    """

    reply: Reply[Any]
    data: bytes
    delivered: Delivered | None
    actual: RoundCost
    predicted: RoundCost
    staleness: int

    def forget_values(self) -> None:
        """Drop the update and the encoded reply, which are stored; the round may be aggregated next."""
        self.reply, self.data, self.delivered = replace(self.reply, update=None), b"", None


def row_of(
    arriving: ArrivingReply, member: Member, bytes_down: int, encodings: tuple[str, ...]
) -> DeviceRound:
    """Return the record's row for an accepted reply.

    Args:
        arriving: the reply.
        member: the device that sent it.
        bytes_down: payload bytes of its task.
        encodings: descriptions of the encodings that the run may request; empty if there is only one.
    """
    asked = member.assigned.uplink if member.assigned else 0
    return DeviceRound(
        ratio=member.at_work.ratio if member.at_work else 1.0,
        bytes_down=bytes_down,
        bytes_up=len(arriving.data),
        measures=arriving.reply.measures,
        actual=arriving.actual,
        staleness=arriving.staleness,
        predicted=arriving.predicted,
        local_work=share_done(member, arriving.reply.measures),
        encoding=encodings[asked] if encodings else "",
    )


@dataclass(frozen=True)
class ReadAhead:
    """A reply that was read before it arrives on the run's clock.

    Attributes:
        delivered: the task as the device received it; None if unknown.
        reply: the decoded reply, to be used once.
    """

    delivered: Delivered | None
    reply: Reply[Any]


def read_reply(
    data: bytes,
    device: DeviceId,
    round_attempt: RoundAttempt,
    method: Method[Any, Any, Any, Any],
    reference: ReferenceModel | None = None,
    content: PayloadContent | None = None,
) -> Reply[Any]:
    """Decode a device's reply to `round_attempt`.

    Args:
        data: the encoded reply, whose digest the transfer has verified.
        device: the device that sent it.
        round_attempt: the round and attempt that it answers.
        method: method of the run.
        reference: values that the task delivered, over which the update may be encoded; None if unknown.
        content: content of the reply, if its writer is this program; None to decode all of it.

    Raises:
        PacketError: the reply is damaged.
        PacketForeign: the reply is from another device or for another attempt.
    """
    kind = Reply[method.update_type]  # type: ignore[name-defined]
    reply: Reply[Any] = codec.decode(
        data,
        kind,
        method.spec,
        limit=codec.payload_limit(method.spec),
        reference=reference,
        verified=True,
        decode_cache=None if content is None else DecodeCache(content),
    )
    if reply.device != device:
        raise PacketForeign(f"reply of {reply.device!r} came from {device}")
    if (reply.round, reply.attempt) != round_attempt:
        raise PacketForeign(
            f"reply to round {reply.round}.{reply.attempt} offered as one to"
            f" {round_attempt.number}.{round_attempt.attempt}"
        )
    return reply


def share_done(member: Member, measures: Measures) -> float:
    """Return the share of the local training that a device did, at most the share that its task asked for."""
    asked = 1.0 if member.assigned is None else member.assigned.local_work
    reported = 1.0 if measures.local_work is UNSET else measures.local_work
    return min(asked, max(reported, LOCAL_WORKS[0]))
