"""A device's plan for each round of a run: its ratio, the predicted cost, and the lessons of past rounds.

Agents and simulated devices share this code, so it has no I/O and no clock. The agent measures the cost of a
round; the simulator computes it.
"""

from dataclasses import dataclass, replace

from msgspec import structs

from fleetune.edge_agent.budget.ratio_controller import MOVED, RatioController
from fleetune.protocols.conditions import Conditions
from fleetune.protocols.method.choice import Budget, DeviceReport
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.wire.messages import TransferKey

COMPACT_MOVED = 0.5  # relative change of the forecast that is reported, in runs that save messages
UNREAD = "it asked for the whole task, and was sent a difference to a model that it does not hold again"
REPORT_SAMPLES_S = 600.0  # seconds after which a smaller change is reported too


@dataclass(frozen=True)
class RoundWork:
    """A device's work in one round, from its task to its update.

    Attributes:
        key: transfer key of the task.
        budget: ratio and share of the local training.
        expected: cost that was predicted when the round started.
        taken: cost so far.
        began_s: start of the download on a monotonic clock, in seconds.
        span_s: duration allowed for the round, in seconds; None if not known.
    """

    key: TransferKey
    budget: Budget
    expected: RoundCost
    taken: RoundCost
    began_s: float = 0.0
    span_s: float | None = None

    def trained(
        self,
        train_s: float,
        bytes_up: int,
        memory_bytes: int | None = None,
        *,
        local_work: float | None = None,
        processor_s: float | None = None,
        compression_error: float | None = None,
    ) -> "RoundWork":
        """Return the work after its reply is made, with the measured costs.

        `local_work` is the share of local training that was done; None if it is the budgeted share.
        """
        share = self.budget.local_work if local_work is None else local_work
        made = self._taking(
            train_s=train_s,
            bytes_up=bytes_up,
            memory_bytes=memory_bytes,
            processor_s=processor_s,
            compression_error=compression_error,
        )
        return replace(made, budget=replace(self.budget, local_work=share))

    def sent(self, upload_s: float, joules: float | None) -> "RoundWork":
        """Return the work after its reply has arrived; `joules` is the energy of the whole round."""
        return self._taking(upload_s=upload_s, joules=joules)

    def _taking(self, **figures: float | None) -> "RoundWork":
        return replace(self, taken=structs.replace(self.taken, **figures))


@dataclass
class RoundPlanner:
    """Plans the rounds of a device in one run, and learns from them.

    Attributes:
        ratio_controller: controller of the ratio; it has chosen once.
        sent_report: the last report sent to the coordinator; None before the first.
        samples_reported_s: when samples were last reported, on a monotonic clock, in seconds.
        compact: True if the run asks for few messages; then only large changes of the forecast are reported.
        newest: key of the latest task.
        underway: the current round; None if it is done, declined or interrupted.
        unread: the latest task that was a difference to a model that the device does not have.
    """

    ratio_controller: RatioController
    sent_report: DeviceReport | None = None
    samples_reported_s: float = 0.0
    compact: bool = False
    newest: TransferKey | None = None
    underway: RoundWork | None = None
    unread: TransferKey | None = None

    @property
    def report(self) -> DeviceReport:
        """The latest report."""
        return self.ratio_controller.report

    @property
    def refusal(self) -> str | None:
        """Why no ratio fits at present; None if one fits."""
        return None if self.ratio_controller.fits else self.report.reason

    @property
    def is_news(self) -> bool:
        """True if the current report should be sent to the coordinator."""
        moved = COMPACT_MOVED if self.compact else MOVED
        return self.sent_report is None or self.ratio_controller.is_news(self.sent_report, moved)

    @property
    def differs(self) -> bool:
        """True if the sample statistics differ from those last reported."""
        sent_report, now = self.sent_report, self.report
        figures = [(one.num_samples, one.new_samples, one.drift) for one in (now, sent_report or now)]
        return figures[0] != figures[1]

    def tell(self) -> DeviceReport:
        """Return the current report and mark it as sent to the coordinator."""
        self.sent_report = self.report
        return self.report

    def note_samples(
        self, num_samples: int, new_samples: int, drift: float | None, *, now_s: float, claimed: int = 0
    ) -> bool:
        """Record the device's samples; return True if they should be reported to the coordinator.

        Args:
            num_samples: current number of training samples.
            new_samples: number of training samples that arrived since the last training.
            drift: see `edge_agent.stream.drift`; None if not known.
            now_s: current time on a monotonic clock, in seconds.
            claimed: training samples that a reply in transit claims; no fewer may be reported.
        """
        held = max(num_samples, claimed)
        self.ratio_controller = self.ratio_controller.holding(held, new_samples, drift)
        short = self.sent_report is not None and self.sent_report.num_samples < claimed
        late = (
            self.sent_report is not None
            and self.differs
            and now_s - self.samples_reported_s >= REPORT_SAMPLES_S
        )
        if self.is_news or short or late:
            self.samples_reported_s = now_s
            return True
        return False

    def begin(
        self,
        key: TransferKey,
        num_bytes: int,
        download_s: float | None,
        proposed: Budget | None = None,
        *,
        began_s: float = 0.0,
    ) -> RoundWork:
        """Plan a task. If a round is still in progress, record that it was not done in time.

        Args:
            key: transfer key of the task.
            num_bytes: size of its payload.
            download_s: seconds of the download; None if the task was stored before.
            proposed: the coordinator's proposal, which the device follows within its own limits; None if the
                device chooses.
            began_s: start of the download on a monotonic clock, in seconds.
        """
        self._give_up(key, began_s)
        controller = self.ratio_controller
        budget = Budget(controller.report.ratio) if proposed is None else controller.within(proposed)
        taken = RoundCost(bytes_down=num_bytes, download_s=download_s)
        work = RoundWork(key, budget, controller.expected(budget), taken, began_s)
        self.newest, self.underway = key, None if key.final_evaluation else work
        return work

    def going_on(self, work: RoundWork) -> RoundWork:
        """Replace the current round by `work`, in which more of the cost is known, and return it."""
        if self.underway is not None and self.underway.key == work.key:
            self.underway = work
        return work

    def interrupt(self) -> None:
        """Drop the current round without learning from it: the device was disconnected, or declined the
        round.
        """
        self.underway = None

    def _give_up(self, key: TransferKey, now_s: float) -> None:
        over, controller = self.underway, self.ratio_controller
        if (
            over is None
            or controller.late is None
            or (over.key.run, over.key.round_attempt) == (key.run, key.round_attempt)
        ):
            return
        self.underway, elapsed_s = None, now_s - over.began_s
        after = controller.given_up(over.budget, over.taken, elapsed_s)
        self.ratio_controller = after.chosen(self.report.conditions)

    def why_unread(self, key: TransferKey) -> str | None:
        """Return the reason to decline an unreadable task; None the first time.

        The first time, the device asks for the whole task instead.
        """
        again, self.unread = self.unread == key, key
        return UNREAD if again else None

    def learn(self, work: RoundWork, conditions: Conditions) -> None:
        """Learn from a finished round, and choose the ratio of the next round.

        A final evaluation sends no model back, so it teaches nothing about costs. If time has a margin, a
        round whose task was replaced by a newer one is skipped too.
        """
        controller = self.ratio_controller
        over = self.newest is not None and self.newest != work.key
        if work.key.final_evaluation or (controller.late is not None and over):
            return
        self.underway = None
        self.ratio_controller = controller.learned(work.budget, work.taken).chosen(conditions)

    def try_again(self, conditions: Conditions) -> None:
        """Choose again some time after no ratio fitted, because the learned costs may have changed."""
        self.ratio_controller = self.ratio_controller.declining().chosen(conditions)
