"""A device's plan for each round of a run: its ratio, the predicted cost, and what past rounds taught.

It is the same for an agent and for a simulated device: no I/O, no clock. The agent measures the cost of a
round, the simulator computes it.
"""

from dataclasses import dataclass, replace

from msgspec import structs

from fleetune.edge_agent.budget.ratio_controller import MOVED, RatioController
from fleetune.protocols.conditions import Conditions
from fleetune.protocols.method.choice import Budget, DeviceReport
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.wire.messages import TransferKey

COMPACT_MOVED = 0.5  # a forecast that moved so much is reported, in runs where each message counts
UNREAD = "it asked for the whole task, and was sent a difference to a model that it does not hold again"
TELL_SAMPLES_S = 600.0  # after this time a small change is reported too


@dataclass(frozen=True)
class RoundWork:
    """A device's work in one round, from its task to its update.

    Attributes:
        key: of the task.
        budget: ratio and share of the local training.
        expected: cost that was predicted when the round started.
        taken: cost so far.
        began_s: when the download started, on a clock that never jumps.
        span_s: seconds that the round is given; None: not known.
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
        left_out: float | None = None,
    ) -> "RoundWork":
        """The work once its reply is made. `local_work` is the share that was done; None: the budget's."""
        share = self.budget.local_work if local_work is None else local_work
        made = self._taking(
            train_s=train_s,
            bytes_up=bytes_up,
            memory_bytes=memory_bytes,
            processor_s=processor_s,
            left_out=left_out,
        )
        return replace(made, budget=replace(self.budget, local_work=share))

    def sent(self, upload_s: float, joules: float | None) -> "RoundWork":
        """The work once its reply has arrived. `joules` is the energy of the whole round."""
        return self._taking(upload_s=upload_s, joules=joules)

    def _taking(self, **figures: float | None) -> "RoundWork":
        return replace(self, taken=structs.replace(self.taken, **figures))


@dataclass
class RoundPlanner:
    """Plans the rounds of a device in one run, and learns from them.

    Attributes:
        ratio_controller: what the device can afford; it has chosen once.
        told: the report that the coordinator has; None: none yet.
        samples_told_s: when samples were last reported, on a clock that never jumps.
        compact: the run wants few messages: only a large change of the forecast is reported.
        newest: the latest task.
        underway: the round at hand; None: it is done, declined or interrupted.
        unread: the latest task that was a difference to a model that the device does not hold.
    """

    ratio_controller: RatioController
    told: DeviceReport | None = None
    samples_told_s: float = 0.0
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
        """Why no ratio fits at present; None: one does."""
        return None if self.ratio_controller.fits else self.report.reason

    @property
    def is_news(self) -> bool:
        """Whether the present report should be sent to the coordinator."""
        moved = COMPACT_MOVED if self.compact else MOVED
        return self.told is None or self.ratio_controller.is_news(self.told, moved)

    @property
    def differs(self) -> bool:
        """Whether the figures of the samples differ from those that the coordinator has."""
        told, now = self.told, self.report
        figures = [(one.num_samples, one.new_samples, one.drift) for one in (now, told or now)]
        return figures[0] != figures[1]

    def tell(self) -> DeviceReport:
        """The report, which the coordinator has from now on."""
        self.told = self.report
        return self.report

    def note_samples(
        self, num_samples: int, new_samples: int, drift: float | None, *, now_s: float, claimed: int = 0
    ) -> bool:
        """Take note of the device's samples; return whether they should be reported to the coordinator.

        Args:
            num_samples: to train on now.
            new_samples: of these, since the last training.
            drift: see `edge_agent.stream.drift`; None: not known.
            now_s: on a clock that never jumps.
            claimed: training samples that a reply on its way claims: no fewer may be reported.
        """
        held = max(num_samples, claimed)
        self.ratio_controller = self.ratio_controller.holding(held, new_samples, drift)
        short = self.told is not None and self.told.num_samples < claimed
        late = self.told is not None and self.differs and now_s - self.samples_told_s >= TELL_SAMPLES_S
        if self.is_news or short or late:
            self.samples_told_s = now_s
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
        """Plan a task. A round that is still under way is over: that it was not done in time is learned from.

        Args:
            key: of the task.
            num_bytes: of its payload.
            download_s: seconds of the download; None: the task was here before.
            proposed: by the coordinator; the device never does more than it can afford. None: it chooses.
            began_s: when its download began, on a clock that never jumps.
        """
        self._give_up(key, began_s)
        controller = self.ratio_controller
        budget = Budget(controller.report.ratio) if proposed is None else controller.within(proposed)
        taken = RoundCost(bytes_down=num_bytes, download_s=download_s)
        work = RoundWork(key, budget, controller.expected(budget), taken, began_s)
        self.newest, self.underway = key, None if key.final_evaluation else work
        return work

    def going_on(self, work: RoundWork) -> RoundWork:
        """`work`, now with more of its cost known."""
        if self.underway is not None and self.underway.key == work.key:
            self.underway = work
        return work

    def interrupt(self) -> None:
        """Forget the round at hand: the device was away, or declined it. It teaches nothing."""
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
        """Why the device declines a task that it cannot read; None: it asks for the whole task, once."""
        again, self.unread = self.unread == key, key
        return UNREAD if again else None

    def learn(self, work: RoundWork, conditions: Conditions) -> None:
        """Learn from a finished round, and choose the ratio of the next.

        A final evaluation sends no model back and teaches nothing. Where time has a margin, neither does a
        round that was over before.
        """
        controller = self.ratio_controller
        over = self.newest is not None and self.newest != work.key
        if work.key.final_evaluation or (controller.late is not None and over):
            return
        self.underway = None
        self.ratio_controller = controller.learned(work.budget, work.taken).chosen(conditions)

    def try_again(self, conditions: Conditions) -> None:
        """Choose again after a while in which no ratio fitted: what was learned may have changed."""
        self.ratio_controller = self.ratio_controller.declining().chosen(conditions)
