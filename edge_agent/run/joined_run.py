"""A run that this agent has joined: it works on tasks on this board, and sees what they take."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from msgspec import UNSET, structs

from fleetune.edge_agent.budget.board_meter import BoardMeter
from fleetune.edge_agent.budget.ratio_controller import RatioController
from fleetune.edge_agent.extensions.adoption.deployed_model import Memory
from fleetune.edge_agent.run.freed_memory import give_back
from fleetune.edge_agent.run.growing_data import GrowingData
from fleetune.edge_agent.run.round_planner import RoundPlanner, RoundWork
from fleetune.edge_agent.run.session import Session
from fleetune.edge_agent.run.task_preview import TaskPreview, preview_task
from fleetune.protocols.errors import StoreError
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.wire.messages import Measured, Ready, TransferKey
from fleetune.protocols.wire.payloads import Enrolment

log = logging.getLogger(__name__)


class JoinedRun:
    """Session, membership and meter of one run.

    Args:
        enrolment: of the run.
        session: of the device in it.
        membership: its ratio chosen once.
        meter: of its board.
        memory: where the ratio controller is kept.
        growing: the device's data, where they grow.
        of_round: then, its session with the samples of a round; between rounds no sample is in memory.
        publish: called when a round's work is done: another model may be served.
        clock: seconds that never jump.
        processor: seconds that this process has used of processors.
    """

    def __init__(
        self,
        enrolment: Enrolment,
        session: Session,
        membership: RoundPlanner,
        meter: BoardMeter,
        memory: Memory,
        *,
        growing: GrowingData | None = None,
        of_round: Callable[[TransferKey], Session] | None = None,
        publish: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        processor: Callable[[], float] = time.process_time,
    ) -> None:
        self.enrolment = enrolment
        self.session: Session | None = session if growing is None else None
        self.last_round = session.last_round
        self.base = session.base
        self._growing, self._of_round = growing, of_round
        self.membership = membership
        self._meter = meter
        self._memory = memory
        self._publish = publish
        self._clock, self._processor = clock, processor
        self._tried_at = clock()
        self._work: RoundWork | None = None
        self._held = 0  # training samples of the last round
        membership.samples_told_s = clock()

    @property
    def grows(self) -> bool:
        """Whether the device's data do."""
        return self._growing is not None

    @property
    def report(self) -> DeviceReport:
        """The latest."""
        return self.membership.report

    @property
    def refusal(self) -> str | None:
        """Why it does not take part just now; None: it does."""
        return self.membership.refusal

    def ready(self) -> Ready:
        """The message that reports the device to the coordinator, also after one of the two was away."""
        self.membership.interrupt()
        base, report = UNSET if self.base is None else self.base, self.membership.tell()
        report = short_report(report) if self.compact else report
        return Ready(self.enrolment.run, self.enrolment.spec.hash, report, base)

    def measured(self, key: TransferKey, *, late: bool = False) -> Measured:
        """The cost of the round so far, and the predicted one; `late`: it was reported before the update."""
        taken, expected = self.taken, self.expected
        if self.compact:
            taken = short_cost(known_late(taken) if late else taken)
            expected = RoundCost() if late else short_cost(expected)
        return Measured(key.run, key.round, key.attempt, taken, expected)

    @property
    def compact(self) -> bool:
        """Whether the run's messages are compact."""
        return self.enrolment.compact is True

    @property
    def taken(self) -> RoundCost:
        """What the round has taken so far."""
        return RoundCost() if self._work is None else self._work.taken

    @property
    def expected(self) -> RoundCost:
        """What it was expected to take when it began."""
        return RoundCost() if self._work is None else self._work.expected

    def begin(self, key: TransferKey, payload: bytes, download_s: float | None) -> None:
        """A task is here. `download_s`: None if it was here before."""
        before = self.membership.ratio_controller
        asked = preview_task(payload, self.enrolment.spec) if before.proposed else TaskPreview()
        began_s = self._clock() - (download_s or 0.0)
        work = self.membership.begin(key, len(payload), download_s, asked.budget, began_s=began_s)
        self._work = replace(work, span_s=asked.span_s)
        if self.membership.ratio_controller is not before:
            self._note_choice(before)

    def work(self, payload: bytes) -> bytes:
        """Reply to the task that was begun; what that took is in `taken`. Raises as `Session.reply` does."""
        assert self._work is not None, "a task is begun before it is worked on"
        self._meter.start()
        began, used, work = self._clock(), self._processor(), self._work
        controller = self.membership.ratio_controller
        until_s = controller.trains_until_s(work.budget, work.taken.known_s, work.span_s)

        def enough() -> bool:
            return until_s is not None and self._clock() - began >= until_s

        try:
            reply, session = self._reply(payload, work, enough)
        except BaseException:
            self._meter.stop()
            self.membership.interrupt()
            raise
        finally:
            give_back()
        self._publish()
        train_s, peak_bytes = self._clock() - began, self._meter.peak_bytes
        processor_s = self._processor() - used
        made = work.trained(
            train_s,
            len(reply),
            peak_bytes,
            local_work=session.local_work,
            processor_s=processor_s,
            left_out=session.left_out,
        )
        self._work = self.membership.going_on(made)
        return reply

    def _reply(self, payload: bytes, work: RoundWork, enough: Callable[[], bool]) -> tuple[bytes, Session]:
        """And the session that made it."""
        if self._growing is None or self._of_round is None:
            assert self.session is not None
            session = self.session
            return self._replied(session, payload, work, enough), session
        session = self._of_round(work.key)
        reply = self._replied(session, payload, work, enough)
        self._held = session.num_samples
        self._growing.trained(work.key)
        return reply, session

    def _replied(
        self, session: Session, payload: bytes, work: RoundWork, enough: Callable[[], bool]
    ) -> bytes:
        mask_time = self.enrolment.mask_time(self.membership.report, "up")
        try:
            return session.reply(payload, work.budget, enough, mask_time)
        finally:
            self.base = session.base  # also where the task could not be read: `ready` then asks for all of it

    def is_at(self, update: TransferKey) -> bool:
        """Whether this is the reply to the task that was begun last."""
        begun = None if self._work is None else self._work.key
        return begun is not None and (begun.run, begun.turn) == (update.run, update.turn)

    def delivered(self, upload_s: float) -> None:
        """The round's update has arrived: learn from the round, and choose the ratio of the next."""
        joules = self._meter.stop()
        if self._work is None or self._work.key.final_evaluation:
            return
        before, self._work = self.membership.ratio_controller, self._work.sent(upload_s, joules)
        self.membership.learn(self._work, self._meter.conditions())
        self._note_choice(before)

    def note_samples(self, *, replied: bool = False) -> bool:
        """Look at data that grow; whether the coordinator should hear what became of them.

        Args:
            replied: a reply is on its way, which claims as many samples as its round had: no more may be
                claimed than are reported.
        """
        if self._growing is None:
            return False
        try:
            found = self._growing.figures()
        except StoreError as problem:
            log.warning("%s", problem)
            return False
        return self.membership.note_samples(
            found.num_samples,
            found.new_samples,
            found.drift,
            now_s=self._clock(),
            claimed=self._held if replied else 0,
        )

    def loss_is_due(self) -> bool:
        """Whether the served model's loss should be tested on samples that have come, by `test_loss`."""
        try:
            return self._growing is not None and self._growing.loss_is_due()
        except StoreError as problem:
            log.warning("%s", problem)
            return False

    def test_loss(self) -> None:
        """Takes long. Raises StoreError."""
        assert self._growing is not None, "only data that grow change"
        self._growing.test_loss()

    def try_again(self) -> None:
        """Once a deadline while nothing fits."""
        now = self._clock()
        if now - self._tried_at < self.enrolment.deadline_s:
            return
        before, self._tried_at = self.membership.ratio_controller, now
        self.membership.try_again(self._meter.conditions())
        self._note_choice(before)

    def _note_choice(self, before: RatioController) -> None:
        now = self.membership.ratio_controller
        if (now.report.ratio, now.fits) != (before.report.ratio, before.fits):
            ratios = (one.report.ratio if one.fits else 0 for one in (now, before))
            log.info("ratio %g, before %g: %s", *ratios, now.report.reason)
        self.keep()

    def keep(self) -> None:
        """For the next start, and for `edge-agent explain`."""
        try:
            self._memory.write(self.membership.ratio_controller.encoded())
        except StoreError as problem:
            log.warning("what rounds taught will be lost at the next start: %s", problem)


# Figures of a clock or a meter have four digits in compact runs: more than they are accurate to. What decides
# anything to the last bit, a ratio or a count, keeps all digits.
_DIGITS = 4
_OF_COST = ("download_s", "train_s", "upload_s", "joules", "left_out")
_OF_REPORT = ("samples_per_s", "uplink_bps", "downlink_bps", "round_s")
_OF_CONDITIONS = ("watts", "celsius")


def short_cost(cost: RoundCost) -> RoundCost:
    """The cost with four digits a figure, without the processor's time."""
    return structs.replace(cost, processor_s=None, **_rounded(cost, _OF_COST))


def short_report(report: DeviceReport) -> DeviceReport:
    """The report with four digits a measured figure."""
    conditions = structs.replace(report.conditions, **_rounded(report.conditions, _OF_CONDITIONS))
    return replace(report, conditions=conditions, **_rounded(report, _OF_REPORT))


def known_late(cost: RoundCost) -> RoundCost:
    """The part of a round's cost that is known only when the update has arrived."""
    return RoundCost(upload_s=cost.upload_s, joules=cost.joules)


def _rounded(of: object, names: tuple[str, ...]) -> dict[str, Any]:
    figures = {name: getattr(of, name) for name in names}
    return {name: None if one is None else float(f"{one:.{_DIGITS}g}") for name, one in figures.items()}
