"""A received reply: read, and passed along until it is stored."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from fleetune.coordinator.extensions.partial_work import share_done
from fleetune.coordinator.rounds.engine_state import Member, RoundAttempt
from fleetune.coordinator.rounds.records import DeviceRound
from fleetune.coordinator.tasks.downlink import Delivered
from fleetune.protocols.errors import PacketForeign
from fleetune.protocols.method.method import DeviceId, Method
from fleetune.protocols.model.spec import ModelSpec
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.update import codec
from fleetune.protocols.update.base import Base
from fleetune.protocols.update.once import ReadBefore, Told
from fleetune.protocols.update.patch import patches_in
from fleetune.protocols.wire.payloads import Reply


@dataclass(frozen=True)
class ArrivingReply:
    """An accepted reply, between its arrival and its place in the round.

    Attributes:
        reply: the decoded reply.
        data: the encoded reply.
        delivered: the task as the device received it; None: no longer known, or not needed.
        actual: measured cost of the round on the device.
        predicted: cost of the round as the device predicted it.
        staleness: number of aggregations by which its base model is older than the newest.
    """

    reply: Reply[Any]
    data: bytes
    delivered: Delivered | None
    actual: RoundCost
    predicted: RoundCost
    staleness: int

    def change(self, member: Member, spec: ModelSpec) -> float | None:
        """`rms_change` of its update, over the share of the local training that the device did; None: not
        known.
        """
        if self.reply.update is None or self.delivered is None:
            return None
        change = rms_change(self.reply.update, self.delivered.base, spec)
        return None if change is None else change / share_done(member, self.reply.measures)


def row_of(
    arriving: ArrivingReply, member: Member, bytes_down: int, encodings: tuple[str, ...]
) -> DeviceRound:
    """What the record says of an accepted reply.

    Args:
        arriving: the reply.
        member: its device.
        bytes_down: payload bytes of its task.
        encodings: in words, those that the run may ask for; empty: it asks for one only.
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
        delivered: its task, as its device has it; None: not known.
        reply: as it was read, for one use.
    """

    delivered: Delivered | None
    reply: Reply[Any]


def read_reply(
    data: bytes,
    device: DeviceId,
    round_attempt: RoundAttempt,
    method: Method[Any, Any, Any, Any],
    base: Base | None = None,
    told: Told | None = None,
) -> Reply[Any]:
    """What a device offered as its reply to `round_attempt`.

    Args:
        data: as a transfer brought it, which has held it against its digest.
        device: that offered it.
        round_attempt: the round and attempt that it answers.
        method: of the run.
        base: what its task brought, where an encoding may have written the update's values; None: not known.
        told: what it says, by a device of this very program; None: all of it is read.

    Raises:
        PacketError: it is damaged; PacketForeign: it is another device's, or to another attempt.
    """
    kind = Reply[method.update_type]  # type: ignore[name-defined]
    reply: Reply[Any] = codec.decode(
        data,
        kind,
        method.spec,
        limit=codec.payload_limit(method.spec),
        base=base,
        verified=True,
        read_before=None if told is None else ReadBefore(told),
    )
    if reply.device != device:
        raise PacketForeign(f"reply of {reply.device!r} came from {device}")
    if (reply.round, reply.attempt) != round_attempt:
        raise PacketForeign(
            f"reply to round {reply.round}.{reply.attempt} offered as one to"
            f" {round_attempt.number}.{round_attempt.attempt}"
        )
    return reply


def rms_change(update: Any, brought: Base, spec: ModelSpec) -> float | None:
    """Root of the mean square, over the entries that `update` holds and its task has `brought`; None: there
    is no such entry.
    """
    squares, entries = 0.0, 0
    for patch in patches_in(update):
        mask = patch.selection.mask(spec)
        held = brought.held[mask]
        change = (patch.values - brought.values[mask])[held].astype(np.float64)
        squares, entries = squares + float(change @ change), entries + change.size
    return float(np.sqrt(squares / entries)) if entries else None
