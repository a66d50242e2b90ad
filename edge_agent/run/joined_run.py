"""A run that this agent has joined: it works on tasks on this board, and measures their cost."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from msgspec import UNSET, structs

from fleetune.edge_agent.budget.board_meter import BoardMeter
from fleetune.edge_agent.budget.ratio_controller import RatioController
from fleetune.edge_agent.run.round_planner import RoundPlanner, RoundWork
from fleetune.edge_agent.run.round_sessions import SessionOfRound
from fleetune.edge_agent.run.samples import Samples
from fleetune.edge_agent.run.session import Session, WorkDone
from fleetune.edge_agent.run.task_reader import TaskPreview, preview_task
from fleetune.edge_agent.state.agent_store import Memory
from fleetune.protocols.errors import StoreError
from fleetune.protocols.freed_memory import give_back
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.pages_on_disk import release
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.wire.messages import Measured, Ready, TransferKey
from fleetune.protocols.wire.payloads import Enrolment

log = logging.getLogger(__name__)


class JoinedRun:
    """Session, round planner and meter of one run.

    Args:
        enrolment: enrolment of the run.
        session: the device's session in the run.
        planner: round planner that has chosen a ratio once.
        meter: meter of the board.
        memory: where the ratio controller is stored.
        samples: the device's growing samples in this run; None if the samples stay the same.
        session_of_round: makes a session with the samples of a round.
        publish: called when a round's work is done, because the deployed model may have changed.
        clock: monotonic clock, in seconds.
        processor: returns the processor time that this process has used, in seconds.
    """

    def __init__(
        self,
        enrolment: Enrolment,
        session: Session,
        planner: RoundPlanner,
        meter: BoardMeter,
        memory: Memory,
        *,
        samples: Samples | None = None,
        session_of_round: SessionOfRound | None = None,
        publish: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        processor: Callable[[], float] = time.process_time,
    ) -> None:
        self.enrolment, self.planner = enrolment, planner
        self.session: Session | None = None if samples is not None and samples.grow else session
        self.last_round, self.base = session.last_round, session.base
        self._samples, self._session_of_round = samples, session_of_round
        self._meter, self._memory, self._publish = meter, memory, publish
        self._clock, self._processor = clock, processor
        self._tried_at = clock()
        self._work: RoundWork | None = None
        self._held = 0  # number of training samples in the last round
        planner.samples_reported_s = clock()

    @property
    def grows(self) -> bool:
        """True if the device's data grow."""
        return self._samples is not None and self._samples.grow

    @property
    def report(self) -> DeviceReport:
        """The latest report."""
        return self.planner.report

    @property
    def refusal(self) -> str | None:
        """Why the device takes no part at present; None if it takes part."""
        return self.planner.refusal

    def ready(self) -> Ready:
        """Return the message that this device is ready, with its latest report. The report counts as sent.

        In the middle of a round, the message is sent after the device or the coordinator was disconnected.
        """
        self.planner.interrupt()
        base, report = UNSET if self.base is None else self.base, self.planner.tell()
        report = short_report(report) if self.compact else report
        return Ready(self.enrolment.run, self.enrolment.spec.hash, report, base)

    def measured(self, key: TransferKey, *, late: bool = False) -> Measured:
        """Return the message with a round's cost so far and its predicted cost.

        Args:
            key: transfer key of the task.
            late: True for the second such message, which follows the update.
        """
        taken, expected = self.taken, self.expected
        if self.compact:
            taken = short_cost(known_late(taken) if late else taken)
            expected = RoundCost() if late else short_cost(expected)
        return Measured(key.run, key.round, key.attempt, taken, expected)

    @property
    def compact(self) -> bool:
        """True if the run asks for few messages."""
        return self.enrolment.compact is True

    @property
    def taken(self) -> RoundCost:
        """Cost of the present round so far."""
        return RoundCost() if self._work is None else self._work.taken

    @property
    def expected(self) -> RoundCost:
        """Cost of the present round, as predicted at its start."""
        return RoundCost() if self._work is None else self._work.expected

    def begin(self, key: TransferKey, payload: bytes, download_s: float | None) -> None:
        """Plan a task that has arrived. `download_s` is None if the task was stored before."""
        before = self.planner.ratio_controller
        asked = preview_task(payload, self.enrolment.spec) if before.proposed else TaskPreview()
        began_s = self._clock() - (download_s or 0.0)
        work = self.planner.begin(key, len(payload), download_s, asked.budget, began_s=began_s)
        self._work = replace(work, span_s=asked.span_s)
        if self.planner.ratio_controller is not before:
            self._note_choice(before)

    def work(self, read: Callable[[], bytes | None]) -> bytes:
        """Do the planned task and return the encoded reply; its cost is in `taken`.

        Args:
            read: reads the task's payload, which is not held while the task is done; None if a newer task has
                replaced it.

        Raises as `Session.reply` does, and StoreError if the payload cannot be read.
        """
        assert self._work is not None, "a task is planned before it is worked on"
        self._meter.start()
        began, used, work = self._clock(), self._processor(), self._work
        controller = self.planner.ratio_controller
        until_s = controller.trains_until_s(work.budget, work.taken.known_s, work.span_s)

        def enough() -> bool:
            return until_s is not None and self._clock() - began >= until_s

        try:
            reply, done = self._reply(read, work, enough)
        except BaseException:
            self._meter.stop()
            self.planner.interrupt()
            raise
        finally:
            release(self.enrolment.weights)
            give_back()
        self._publish()
        train_s, peak_bytes = self._clock() - began, self._meter.peak_bytes
        processor_s = self._processor() - used
        made = work.trained(
            train_s,
            len(reply),
            peak_bytes,
            local_work=done.local_work,
            processor_s=processor_s,
            compression_error=done.compression_error,
        )
        self._work = self.planner.going_on(made)
        return reply

    def _reply(
        self, read: Callable[[], bytes | None], work: RoundWork, enough: Callable[[], bool]
    ) -> tuple[bytes, WorkDone]:
        """Return the reply and its cost. If samples grow, the session and its samples are then released."""
        session = self.session
        if session is None:
            assert self._session_of_round is not None, "samples that grow come with it"
            session = self._session_of_round(work.key)
        mask_time = self.enrolment.mask_time(self.planner.report, "up")
        try:
            reply = session.reply(_there(read()), work.budget, enough, mask_time)
        finally:
            # also if the task could not be read, because `ready` then asks for the whole task
            self.base = session.base
        self._held = session.num_samples
        if self._samples is not None:
            self._samples.trained(work.key)
        return reply, session.done

    def is_at(self, update: TransferKey) -> bool:
        """True if this update answers the task that was planned last."""
        begun = None if self._work is None else self._work.key
        return begun is not None and (begun.run, begun.round_attempt) == (update.run, update.round_attempt)

    def delivered(self, upload_s: float) -> None:
        """Learn from a round whose update was delivered, and choose the ratio of the next."""
        joules = self._meter.stop()
        if self._work is None or self._work.key.final_evaluation:
            return
        before, self._work = self.planner.ratio_controller, self._work.sent(upload_s, joules)
        self.planner.learn(self._work, self._meter.conditions())
        self._note_choice(before)

    def note_samples(self, *, replied: bool = False) -> bool:
        """Record newly arrived samples; return True if they should be reported to the coordinator.

        Args:
            replied: True if a reply is being sent. The reply claims the samples of its round, so no fewer may
                be reported.
        """
        try:
            found = None if self._samples is None else self._samples.figures()
        except StoreError as problem:
            log.warning("%s", problem)
            return False
        if found is None:
            return False
        return self.planner.note_samples(
            found.num_samples,
            found.new_samples,
            found.drift,
            now_s=self._clock(),
            claimed=self._held if replied else 0,
        )

    def loss_is_due(self) -> bool:
        """True if enough new samples have arrived to test the deployed model's loss with `test_loss`."""
        try:
            return self._samples is not None and self._samples.loss_is_due()
        except StoreError as problem:
            log.warning("%s", problem)
            return False

    def test_loss(self) -> None:
        """Test the deployed model's loss on newly arrived samples, which takes long. Raises StoreError."""
        if self._samples is not None:
            self._samples.test_loss()

    def try_again(self) -> None:
        """Choose a ratio again while none fits, once for each round deadline."""
        now = self._clock()
        if now - self._tried_at < self.enrolment.deadline_s:
            return
        before, self._tried_at = self.planner.ratio_controller, now
        self.planner.try_again(self._meter.conditions())
        self._note_choice(before)

    def _note_choice(self, before: RatioController) -> None:
        now = self.planner.ratio_controller
        if (now.report.ratio, now.fits) != (before.report.ratio, before.fits):
            ratios = (one.report.ratio if one.fits else 0 for one in (now, before))
            log.info("ratio changed to %g from %g: %s", *ratios, now.report.reason)
        self.keep()

    def keep(self) -> None:
        """Store the ratio controller, for the next start and for `edge-agent explain`."""
        try:
            self._memory.write(self.planner.ratio_controller.encoded())
        except StoreError as problem:
            log.warning("the costs of past rounds will be lost at the next start: %s", problem)


# Compact runs send measurements with four significant digits, which is more than their accuracy. Values that
# must be exact on both sides, such as a ratio or a count, keep all digits.
_DIGITS = 4
_OF_COST = ("download_s", "train_s", "upload_s", "joules", "compression_error")
_OF_REPORT = ("samples_per_s", "uplink_bps", "downlink_bps", "round_s")
_OF_CONDITIONS = ("watts", "celsius")


def _there(payload: bytes | None) -> bytes:
    if payload is None:
        raise StoreError("the task is no longer stored: a newer one has replaced it")
    return payload


def short_cost(cost: RoundCost) -> RoundCost:
    """Return the cost rounded to four significant digits, without the processor time."""
    return structs.replace(cost, processor_s=None, **_rounded(cost, _OF_COST))


def short_report(report: DeviceReport) -> DeviceReport:
    """Return the report with its measurements rounded to four significant digits."""
    conditions = structs.replace(report.conditions, **_rounded(report.conditions, _OF_CONDITIONS))
    return replace(report, conditions=conditions, **_rounded(report, _OF_REPORT))


def known_late(cost: RoundCost) -> RoundCost:
    """Return the part of a round's cost that is known only after the update has arrived."""
    return RoundCost(upload_s=cost.upload_s, joules=cost.joules)


def _rounded(of: object, names: tuple[str, ...]) -> dict[str, Any]:
    figures = {name: getattr(of, name) for name in names}
    return {name: None if one is None else float(f"{one:.{_DIGITS}g}") for name, one in figures.items()}
