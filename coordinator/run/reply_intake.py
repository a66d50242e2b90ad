"""Processes arriving replies: reads each with its reference, checks it, and keeps it for the open round."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET

from fleetune.coordinator.extensions.extension import Arrival
from fleetune.coordinator.rounds.engine_state import RoundAttempt
from fleetune.coordinator.rounds.events import Declined, ReplyArrived
from fleetune.coordinator.rounds.rejections import RejectionReason, rejection_of
from fleetune.coordinator.run.replies import ArrivingReply, ReadAhead, read_reply
from fleetune.coordinator.run.run_events import ReplyRefused
from fleetune.coordinator.run.run_parts import RunParts
from fleetune.coordinator.tasks.downlink import Delivered, add_unsent
from fleetune.protocols.errors import PacketError, PacketForeign
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.update.encodings import RAW
from fleetune.protocols.update.reference_model import ReferenceModel
from fleetune.protocols.update.shared_payload_cache import PayloadContent
from fleetune.protocols.wire.messages import TransferKey, readable
from fleetune.protocols.wire.payloads import Reply


@dataclass(frozen=True)
class Received:
    """The consequences of a reply, or of an offer of a reply.

    Attributes:
        event: the event for the engine.
        arriving: the reply, if it counts.
        refused: the run event of a reply that is damaged, implausible or not the one that was offered.
    """

    event: ReplyArrived | Declined
    arriving: ArrivingReply | None = None
    refused: ReplyRefused | None = None


class ReplyIntake:
    """Processes the replies of one run.

    Args:
        run: parts of the run.
    """

    def __init__(self, run: RunParts) -> None:
        self._run = run
        self._encodes = any(one.name != RAW for one in run.enrolment.uplinks)

    def receive(
        self,
        device: DeviceId,
        round_attempt: RoundAttempt,
        data: bytes,
        actual: RoundCost,
        predicted: RoundCost,
        ahead: ReadAhead | None,
    ) -> Received:
        """Read and check a reply. The arguments are those of `RunController.receive`."""
        rejection = rejection_of(self._run.state, device, round_attempt)
        try:
            arriving = self._read(device, round_attempt, data, rejection, actual, predicted, ahead)
        except PacketError as problem:
            if rejection and self._is_unreadable(device, round_attempt):
                return Received(ReplyArrived(device, *round_attempt, rejection))
            return self._refuse(device, round_attempt, problem)
        reply = arriving.reply
        event = ReplyArrived(
            device,
            *round_attempt,
            rejection,
            leaving=reply.leaving,
            loss=reply.measures.train_loss,
            compression_error=actual.compression_error,
        )
        return Received(event, arriving if rejection is None else None)

    def refuse_offer(self, device: DeviceId, transfer_key: TransferKey, reason: str) -> Received | None:
        """Refuse an offered reply, for this reason; None if the offer is from another run or not awaited."""
        state, round_attempt = self._run.state, RoundAttempt.of(transfer_key)
        if transfer_key.run == self._run.enrolment.run:
            rejection = rejection_of(state, device, round_attempt)
            if rejection is not None:
                return Received(ReplyArrived(device, *round_attempt, rejection))
            if state.awaited_attempt(device) == round_attempt:
                return self._refuse(device, round_attempt, PacketForeign(reason))
        self._run.accounts.ledger.refuse(PacketForeign.__name__)
        return None

    def _refuse(self, device: DeviceId, round_attempt: RoundAttempt, problem: PacketError) -> Received:
        """Refuse a reply as if its device had declined. Counted by kind and device."""
        kind = type(problem).__name__
        self._run.accounts.ledger.refuse(kind, device=device)
        declined = Declined(device, *round_attempt, readable(f"{kind}: {problem}"), replied=True)
        return Received(declined, refused=ReplyRefused(device, *round_attempt, problem))

    def _read(
        self,
        device: DeviceId,
        round_attempt: RoundAttempt,
        data: bytes,
        rejection: RejectionReason | None,
        actual: RoundCost,
        predicted: RoundCost,
        ahead: ReadAhead | None,
    ) -> ArrivingReply:
        """Read a reply and check it. `rejection`: reason why it does not count; None if it counts.

        Raises:
            PacketError: the reply is damaged, implausible, or not the one that was offered.
        """
        # by now, less may be known of the task than when `ahead` was read
        ahead = ahead if rejection is None else None
        delivered = self._delivered(device, round_attempt) if ahead is None else ahead.delivered
        reference, method, state = self._reference(delivered), self._run.method.method, self._run.state
        reply = read_reply(data, device, round_attempt, method, reference) if ahead is None else ahead.reply
        if rejection is None and reply.base not in (
            UNSET,
            None if reference is None else reference.digest,
        ):
            raise PacketForeign(f"update of {device} was written with another reference than its task")
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
    ) -> Callable[[bytes, PayloadContent | None], ReadAhead]:
        """Return a thread-safe function that reads a device's reply to the task it has just been sent.

        The function raises PacketError.
        """
        delivered = self._delivered(device, round_attempt)
        reference, method = self._reference(delivered), self._run.method.method
        return lambda data, content: ReadAhead(
            delivered, read_reply(data, device, round_attempt, method, reference, content)
        )

    def _is_unreadable(self, device: DeviceId, round_attempt: RoundAttempt) -> bool:
        """True if replies are encoded over a reference, and this device's reference is unknown."""
        return self._encodes and self._delivered(device, round_attempt) is None

    def keep(self, arriving: ArrivingReply) -> None:
        """Store a counted reply so that it can be read without its reference. Call inside `store.step()`."""
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
        # count now: the task's size shrinks once the device is known to hold its content
        self.count_task_of(reply)
        run.tasks.taken(reply.device, delivered)

    def count_task_of(self, reply: Reply[Any]) -> None:
        """Count the task of a device that replies, if a restart lost the receipt."""
        run, device = self._run, reply.device
        if device not in run.accounts.sent_bytes:
            round_attempt = reply.round, reply.attempt
            key = TransferKey("task", run.enrolment.run, *round_attempt, reply.update is None)
            run.count_delivered(device, key, len(run.tasks.payload(device, key)))

    def _delivered(self, device: DeviceId, round_attempt: RoundAttempt) -> Delivered | None:
        """Return the task as the device received it; None if unknown or not needed."""
        if not self._encodes and self._run.tasks.downlink is None:
            return None
        return self._run.tasks.delivered(device, round_attempt, self._run.state.round_attempt)

    def _reference(self, delivered: Delivered | None) -> ReferenceModel | None:
        """Return the reference over which an update was encoded; empty if unknown, None for plain values."""
        if not self._encodes:
            return None
        return (
            ReferenceModel.nothing(self._run.method.method.spec) if delivered is None else delivered.reference
        )

    def _others(self, device: DeviceId) -> Iterator[Any]:
        """Yield the updates of all other devices in the open round."""
        state = self._run.state
        others = tuple(one for one in state.replied if one != device)
        return (update for _, update in self._run.aggregation.updates(state.round_attempt.number, others))
