"""A run this device takes part in: it works on tasks, sees what they take, and chooses its ratio anew."""

import logging
import time
from collections.abc import Callable

from msgspec.structs import replace

from fleetune.edge_agent.budget.board_meter import BoardMeter
from fleetune.edge_agent.budget.ratio_controller import RatioController
from fleetune.edge_agent.run.freed_memory import give_back
from fleetune.edge_agent.run.session import Memory, Session
from fleetune.protocols.errors import StoreError
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.skeletons.choice import Budget, DeviceReport
from fleetune.protocols.wire.messages import TransferKey
from fleetune.protocols.wire.payloads import Enrolment

log = logging.getLogger(__name__)


class Membership:
    """Session, ratio controller and meter of one run.

    Args:
        enrolment: of the run.
        session: of the device in it.
        ratio_controller: what it can afford, chosen once.
        meter: of its board.
        memory: where the ratio controller is kept.
        clock: seconds that never jump.
    """

    def __init__(
        self,
        enrolment: Enrolment,
        session: Session,
        ratio_controller: RatioController,
        meter: BoardMeter,
        memory: Memory,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.enrolment = enrolment
        self.session = session
        self.ratio_controller = ratio_controller
        self._meter = meter
        self._memory = memory
        self._clock = clock
        self._told: DeviceReport | None = None
        self._tried_at = clock()
        self._transfer_key: TransferKey | None = None
        self._ratio = self.report.ratio
        self._expected = RoundCost()
        self._taken = RoundCost()

    @property
    def report(self) -> DeviceReport:
        """The latest."""
        return self.ratio_controller.report

    @property
    def refusal(self) -> str | None:
        """Why it does not take part just now; None: it does."""
        return None if self.ratio_controller.fits else self.report.reason

    def told(self) -> DeviceReport:
        """The report, for the coordinator: from now on it knows this one."""
        self._told = self.report
        return self.report

    def begin(self, transfer_key: TransferKey, num_bytes: int, download_s: float | None) -> None:
        """A task is here. `download_s`: None if it was here before."""
        self._transfer_key, self._ratio, self._expected = (
            transfer_key,
            self.report.ratio,
            self.ratio_controller.predicted,
        )
        self._taken = RoundCost(bytes_down=num_bytes, download_s=download_s)

    def work(self, payload: bytes) -> bytes:
        """Answer the task; what that took is in `taken`. Raises as `Session.answer` does."""
        self._meter.start()
        began = self._clock()
        try:
            reply = self.session.answer(payload, Budget(self._ratio))
        except BaseException:
            self._meter.stop()
            raise
        finally:
            give_back()
        self._taken = replace(
            self._taken,
            train_s=self._clock() - began,
            memory_bytes=self._meter.peak_bytes,
            bytes_up=len(reply),
        )
        return reply

    @property
    def taken(self) -> RoundCost:
        """What the round has taken so far."""
        return self._taken

    @property
    def expected(self) -> RoundCost:
        """What it was expected to take when it began."""
        return self._expected

    def is_at(self, update: TransferKey) -> bool:
        """Whether this is the reply to the task that was begun last."""
        begun = self._transfer_key
        return begun is not None and (begun.run, begun.round, begun.attempt) == (
            update.run,
            update.round,
            update.attempt,
        )

    def delivered(self, upload_s: float) -> None:
        """The round's update has arrived: learn from the round, and choose the ratio of the next. A final
        evaluation sends no model back and teaches nothing.
        """
        joules = self._meter.stop()
        if self._transfer_key is None or self._transfer_key.final_evaluation:
            return
        self._taken = replace(self._taken, upload_s=upload_s, joules=joules)
        self.ratio_controller = self.ratio_controller.learned(self._ratio, self._taken)
        self.reconsider()

    def reconsider(self) -> None:
        """Choose again by how the board is now."""
        before, self.ratio_controller = (
            self.ratio_controller,
            self.ratio_controller.chosen(self._meter.conditions()),
        )
        if (self.report.ratio, self.ratio_controller.fits) != (before.report.ratio, before.fits):
            ratios = (one.report.ratio if one.fits else 0 for one in (self.ratio_controller, before))
            log.info("ratio %g, before %g: %s", *ratios, self.report.reason)
        self.keep()

    def try_again(self) -> None:
        """Once a deadline while nothing fits: what was learned may be true no longer."""
        now = self._clock()
        if now - self._tried_at < self.enrolment.deadline_s:
            return
        self._tried_at, self.ratio_controller = now, self.ratio_controller.declining()
        self.reconsider()

    @property
    def is_news(self) -> bool:
        """Whether the coordinator should hear of the present report."""
        return self._told is None or self.ratio_controller.is_news(self._told)

    def keep(self) -> None:
        """For the next start, and for `edge-agent explain`."""
        try:
            self._memory.write(self.ratio_controller.encoded())
        except StoreError as problem:
            log.warning("what rounds taught will be lost at the next start: %s", problem)
