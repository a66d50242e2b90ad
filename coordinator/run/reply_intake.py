"""Replies on their way in: read with their base, checked, and kept for the open round."""

from collections.abc import Callable, Iterator
from typing import Any

from msgspec import UNSET

from fleetune.coordinator.extensions.extension import Arrival
from fleetune.coordinator.rounds.engine_state import RoundAttempt
from fleetune.coordinator.rounds.events import ReplyArrived
from fleetune.coordinator.rounds.rejections import RejectionReason
from fleetune.coordinator.run.replies import ArrivingReply, ReadAhead, read_reply
from fleetune.coordinator.run.run_parts import RunParts
from fleetune.coordinator.tasks.downlink import Delivered, add_unsent
from fleetune.protocols.errors import PacketForeign
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.update.base import Base
from fleetune.protocols.update.encodings import RAW
from fleetune.protocols.update.once import Told
from fleetune.protocols.wire.messages import TransferKey
from fleetune.protocols.wire.payloads import Reply


class ReplyIntake:
    """Takes the replies of one run in.

    Args:
        run: its parts.
    """

    def __init__(self, run: RunParts) -> None:
        self._run = run
        self._encodes = any(one.name != RAW for one in run.enrolment.uplinks)
        self._measures_change = run.settings.round.prefer == "pyramid"

    def read(
        self,
        device: DeviceId,
        round_attempt: RoundAttempt,
        data: bytes,
        rejection: RejectionReason | None,
        actual: RoundCost,
        predicted: RoundCost,
        ahead: ReadAhead | None,
    ) -> ArrivingReply:
        """Read a reply and check it.

        Args:
            device: that it came from.
            round_attempt: the round and attempt it was offered for.
            data: the encoded `Reply`, as a transfer has verified it.
            rejection: why it does not count; None: it counts.
            actual: what the round took of the device.
            predicted: what the device expected the round to take.
            ahead: what `reading` made of this data; None: it is read now.

        Raises:
            PacketError: it is damaged, implausible, or not what it was offered as.
        """
        ahead = ahead if rejection is None else None  # what is known of its task may be less by now
        delivered = self.delivered(device, round_attempt) if ahead is None else ahead.delivered
        base, method, state = self.base(delivered), self._run.method.method, self._run.state
        reply = read_reply(data, device, round_attempt, method, base) if ahead is None else ahead.reply
        if rejection is None and reply.base not in (UNSET, None if base is None else base.digest):
            raise PacketForeign(f"update of {device} was written with another base than its task")
        if rejection is None and (reply.update is None) != (state.stage == "evaluating"):
            kind = "without" if reply.update is None else "with"
            raise PacketForeign(f"reply {kind} an update to round {state.round_attempt.number}")
        report, counts = state.member(device).report, rejection is None
        self._run.extensions.check(Arrival(reply, report, counts, lambda: self._others(device)))
        return ArrivingReply(
            reply, data, delivered, actual, predicted, state.round_attempt.number - reply.round
        )

    def reading(
        self, device: DeviceId, round_attempt: RoundAttempt
    ) -> Callable[[bytes, Told | None], ReadAhead]:
        """A function that reads a device's reply to the task that it has just been sent, in any thread.

        It raises PacketError.
        """
        delivered = self.delivered(device, round_attempt)
        base, method = self.base(delivered), self._run.method.method
        return lambda data, told: ReadAhead(
            delivered, read_reply(data, device, round_attempt, method, base, told)
        )

    def is_unreadable(self, device: DeviceId, round_attempt: RoundAttempt) -> bool:
        """True if replies are written over a base, and this device's base is not known any more."""
        return self._encodes and self.delivered(device, round_attempt) is None

    def arrived(
        self, arriving: ArrivingReply, round_attempt: RoundAttempt, rejection: RejectionReason | None
    ) -> ReplyArrived:
        """The engine's event for a reply."""
        reply = arriving.reply
        member = self._run.state.member(reply.device)
        change = arriving.change(member, self._run.method.method.spec) if self._measures_change else None
        joules = arriving.predicted.joules if arriving.actual.joules is None else arriving.actual.joules
        return ReplyArrived(
            reply.device,
            *round_attempt,
            rejection,
            leaving=reply.leaving,
            loss=reply.measures.train_loss,
            num_bytes=len(arriving.data),
            joules=joules,
            change=change,
            compression_error=arriving.actual.left_out,
        )

    def keep(self, arriving: ArrivingReply) -> None:
        """Keep a reply that counts, so that it can be read without its base. Inside `store.step()`."""
        run, reply, delivered = self._run, arriving.reply, arriving.delivered
        if reply.update is None:
            return
        if delivered is None:
            run.open_round.keep(reply, arriving.data)
            return
        method = run.method.method
        if delivered.unsent is not None and method.starts_from_task:
            add_unsent(reply.update, delivered.unsent, method.spec)
        run.open_round.keep(reply)
        self.count_task_of(reply)  # now, because its size is less once the device holds what it brought
        run.tasks.taken(reply.device, delivered)

    def count_task_of(self, reply: Reply[Any]) -> None:
        """Count the task of a device that replies, if a restart lost the receipt."""
        run, device = self._run, reply.device
        if device not in run.accounts.sent_bytes:
            round_attempt = reply.round, reply.attempt
            key = TransferKey("task", run.enrolment.run, *round_attempt, reply.update is None)
            run.count_delivered(device, key, len(run.tasks.payload(device, key)))

    def delivered(self, device: DeviceId, round_attempt: RoundAttempt) -> Delivered | None:
        """What a device had of its task; None: that is not known any more, or not needed."""
        if not self._encodes and self._run.tasks.downlink is None and not self._measures_change:
            return None
        return self._run.tasks.delivered(device, round_attempt, self._run.state.round_attempt)

    def base(self, delivered: Delivered | None) -> Base | None:
        """The base that an update's values were written with; empty if unknown. None: values are plain."""
        if not self._encodes:
            return None
        return Base.nothing(self._run.method.method.spec) if delivered is None else delivered.base

    def _others(self, device: DeviceId) -> Iterator[Any]:
        """The updates that the open round has from other devices."""
        state = self._run.state
        others = tuple(one for one in state.replied if one != device)
        return (update for _, update in self._run.aggregation.updates(state.round_attempt.number, others))
