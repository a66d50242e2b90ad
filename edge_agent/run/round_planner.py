"""A device's part in a run, round after round: what it chooses, what it expects, what it learns.

The same for an agent and for a simulated device: no I/O, no clock. What a round takes is measured by the one
and imagined by the other.
"""

from dataclasses import dataclass, replace

from msgspec import structs

from fleetune.edge_agent.budget.ratio_controller import MOVED, RatioController
from fleetune.protocols.conditions import Conditions
from fleetune.protocols.method.choice import Budget, DeviceReport
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.wire.messages import TransferKey

COMPACT_MOVED = 0.5  # a forecast that moved so much is told, where each message counts
UNREAD = "it asked for the whole task, and was sent a difference to a model that it does not hold again"
TELL_SAMPLES_S = 600.0  # a change that is no news is told after a while


@dataclass(frozen=True)
class RoundWork:
    """What a device does in one round, from its task to its update.

    Attributes:
        key: of the task.
        budget: that it runs within: its ratio, and how much of the local training.
        expected: what it was expected to take when it began.
        taken: what it has taken so far.
        began_s: when its download began, on a clock that never jumps.
        span_s: that its round is given; None: not said.
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
        """Its reply is made, with this share of the local training; None: as much as was to be done."""
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
        """Its reply has arrived; `joules` of the whole round."""
        return self._taking(upload_s=upload_s, joules=joules)

    def _taking(self, **figures: float | None) -> "RoundWork":
        return replace(self, taken=structs.replace(self.taken, **figures))


@dataclass
class RoundPlanner:
    """What a device knows of its own part in a run.

    Attributes:
        ratio_controller: what it can afford, chosen once.
        told: the report that the coordinator has; None: none yet.
        samples_told_s: when it was last told of samples, on a clock that never jumps.
        compact: the run wants few messages: a forecast is reported only where it changed a lot.
        newest: the task that was begun last.
        underway: its round, as long as it is neither done, nor declined, nor interrupted.
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
        """The latest."""
        return self.ratio_controller.report

    @property
    def refusal(self) -> str | None:
        """Why nothing that it could do fits just now; None: something does."""
        return None if self.ratio_controller.fits else self.report.reason

    @property
    def is_news(self) -> bool:
        """Whether the coordinator should hear of the present report."""
        moved = COMPACT_MOVED if self.compact else MOVED
        return self.told is None or self.ratio_controller.is_news(self.told, moved)

    @property
    def differs(self) -> bool:
        """Whether the device has other samples than the coordinator knows of."""
        told, now = self.told, self.report
        figures = [(one.num_samples, one.new_samples, one.drift) for one in (now, told or now)]
        return figures[0] != figures[1]

    def tell(self) -> DeviceReport:
        """The report, for the coordinator: from now on it knows this one."""
        self.told = self.report
        return self.report

    def note_samples(
        self, num_samples: int, new_samples: int, drift: float | None, *, now_s: float, claimed: int = 0
    ) -> bool:
        """The device's data have grown; whether the coordinator should hear of it.

        Args:
            num_samples: to train on now.
            new_samples: of these, since the last training.
            drift: see `edge_agent.stream.drift`; None: it cannot tell.
            now_s: on a clock that never jumps.
            claimed: samples that a reply on its way says it was trained on: no fewer may be reported.
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
        """A task is here. A round that is under way is over: that it was not done by then is a lesson, too.

        Args:
            key: of the task.
            num_bytes: of its payload.
            download_s: None if it was here before.
            proposed: what it was planned at, where the coordinator proposes that; the device never does more
                than it can afford.
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
        """`work`, which has come further."""
        if self.underway is not None and self.underway.key == work.key:
            self.underway = work
        return work

    def interrupt(self) -> None:
        """It was away, or declined the task: a smaller ratio would not have been done in time either."""
        self.underway = None

    def _give_up(self, key: TransferKey, now_s: float) -> None:
        over, controller = self.underway, self.ratio_controller
        if over is None or controller.late is None or (over.key.run, over.key.turn) == (key.run, key.turn):
            return
        self.underway, elapsed_s = None, now_s - over.began_s
        after = controller.given_up(over.budget, over.taken, elapsed_s)
        self.ratio_controller = after.chosen(self.report.conditions)

    def why_unread(self, key: TransferKey) -> str | None:
        """Why the device declines a task that it cannot read; None: it asks for all of it, once per task."""
        again, self.unread = self.unread == key, key
        return UNREAD if again else None

    def learn(self, work: RoundWork, conditions: Conditions) -> None:
        """From a round done to its end: choose the ratio of the next. A final evaluation sends no model back
        and teaches nothing; nor does, where time has a margin, one that was over before, once more.
        """
        controller = self.ratio_controller
        over = self.newest is not None and self.newest != work.key
        if work.key.final_evaluation or (controller.late is not None and over):
            return
        self.underway = None
        self.ratio_controller = controller.learned(work.budget, work.taken).chosen(conditions)

    def try_again(self, conditions: Conditions) -> None:
        """After a while in which nothing fitted: what was learned may be true no longer."""
        self.ratio_controller = self.ratio_controller.declining().chosen(conditions)
