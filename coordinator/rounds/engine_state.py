"""Everything the round engine remembers, as one record that msgspec can carry."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Self

from msgspec import UNSET

from fleetune.coordinator.rounds.compression_error import CompressionErrors
from fleetune.coordinator.rounds.member_groups import Groups
from fleetune.coordinator.rounds.spent_budget import SpentBudget
from fleetune.protocols.method.choice import Budget, DeviceReport, values_sent
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.wire.messages import TransferKey

Stage = Literal["waiting", "training", "rehearsing", "finished"]
Answer = Literal["update", "declined", "expired"]


class Turn(NamedTuple):
    """One asking; later turns are greater."""

    number: int
    attempt: int

    @classmethod
    def of(cls, key: TransferKey) -> Self:
        """What a payload is for."""
        return cls(key.round, key.attempt)


NEVER = Turn(0, 0)


@dataclass(frozen=True)
class ScheduleState:
    """What the engine remembers of the run's [schedule].

    Attributes:
        due: a round is due, and has not closed yet.
        day: whose slot was used last, counted from 1970-01-01; None: none yet.
        since: when the last round became due, on the run's clock; None: none yet.
        missed: how many slots went by without a round.
    """

    due: bool = False
    day: int | None = None
    since: float | None = None
    missed: int = 0


@dataclass(frozen=True)
class Member:
    """What is known of one device.

    Attributes:
        report: its latest; None when it refused before it ever gave one.
        admitted: whether the method has seen this report.
        ready: whether it is there.
        left: it stopped early; it is asked for the final evaluation only.
        refusal: why it will not join the run.
        asked: the turn of its latest task; NEVER before the first.
        answer: what it said to that task; "expired": it took too long (see
            `coordinator.rounds.window_engine`).
        declined_round: the latest round it declined, 0 for none.
        declined_reason: why.
        diverged: because its training, or its task, was no longer finite.
        stretch: how many times longer a round is thought to take it than it says, at least 1.
        returning: it was there when the coordinator stopped, and has not been heard of since it is back.
        missed: deadlines that it let pass in a row, see `coordinator.rounds.policies.unresponsive`.
        trained: its report is older than its last update, so that what that calls new was trained on.
        asked_at, took_s, loss: where devices are drawn by worth: when it was asked last, how long its
            last reply took, and the loss that this told; None: not known.
        change: with `prefer = "pyramid"`: how much its last update changed what it was sent, likewise.
        dealt: with an objective: what its latest task was planned at.
        compression_error: likewise, of its last update (see `RoundCost`); None: not reported.
        agent: program and version of its agent, as its presence reports; "": not reported, or simulated.
    """

    report: DeviceReport | None = None
    admitted: bool = False
    ready: bool = False
    left: bool = False
    refusal: str | None = None
    asked: Turn = NEVER
    answer: Answer | None = None
    declined_round: int = 0
    declined_reason: str = ""
    diverged: bool = False
    stretch: float = 1.0
    returning: bool = False
    missed: int = 0
    trained: bool = False
    asked_at: float | None = None
    took_s: float | None = None
    loss: float | None = None
    change: float | None = None
    dealt: Budget | None = None
    compression_error: float | None = None
    agent: str = ""

    @property
    def stays(self) -> bool:
        """Whether it is, or would be if it came back, part of the training."""
        return not self.left and self.refusal is None

    @property
    def at_work(self) -> DeviceReport | None:
        """Its report, with the ratio that it is asked to work at and the seconds that it expects of it."""
        report, dealt = self.report, self.dealt
        if report is None or dealt is None or report.affords is UNSET or not report.affords:
            return report
        told = next((one for one in report.affords if one.ratio == dealt.ratio), None)
        values = values_sent(report, dealt)
        round_s = report.round_s if told is None else told.seconds(dealt.local_work, values)
        part = "" if dealt.local_work == 1 else f", {dealt.local_work:.0%} of local training"
        why = f"p = {dealt.ratio:g}{part}: proposed; it affords up to p = {report.affords[-1].ratio:g}"
        return replace(report, ratio=dealt.ratio, round_s=round_s, reason=why)

    @property
    def is_unseen(self) -> bool:
        """Whether the method has yet to see its report."""
        return self.report is not None and self.refusal is None and not self.admitted


_STRANGER = Member()
_PARTS = {"stage", "rounds_done", "participants"}  # what decides on a device's part, besides its member


@dataclass
class EngineState:
    """The run so far.

    The engine changes it, by `change`, `put` and `count` alone, so that an event costs what it changed and
    not what there is; others read it, and `copy` it to keep it. Members are values: they are replaced.

    Attributes:
        stage: waiting for devices, training a round, rehearsing, or finished.
        rounds_done: training rounds that were aggregated.
        attempt: of round `rounds_done + 1`, the one that runs or comes next.
        participants: of the round that runs, ascending; semi-asynchronously, who works or has replied.
        until: when the round that runs is over; while waiting, when to look again; None: no such time.
        span_s: how long the turn that was opened last is given; None: none was.
        extended: how often the window that is open was extended.
        seen_at: the latest `now`.
        members: every device ever heard of.
        counters: how often: replies and declines dropped, by objection; `declined` rounds, `refused` runs,
            `abandoned` attempts, devices `gone`.
        reason: why training ended.
        closed: the turn that closed last, as long as it can be taken back; NEVER: none can.
        suspects: whose updates strained it most.
        next_attempt: of the round after the one that runs: one that was asked before is not asked again.
        spoilt: the round that was last spoilt or taken back, and how often.
        gather_until: until then no round starts, so that those who were there before a restart can come back.
        start_by: where `round.start_with` is not set: when round 1 opens with the devices that are there,
            however few; None: no device is there yet.
        plan: what is remembered of the run's schedule.
        ahead_s: by how much the time of day is ahead of `now`.
        paused: no round opens.
        ends: why none opens any more but the final evaluation; "": they do.
        compression_errors: with an objective: of the run's encodings, as devices report them.
        spent: what the run has spent.
    """

    stage: Stage = "waiting"
    rounds_done: int = 0
    attempt: int = 1
    participants: tuple[DeviceId, ...] = ()
    until: float | None = None
    span_s: float | None = None
    extended: int = 0
    seen_at: float = 0.0
    members: dict[DeviceId, Member] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    reason: str = ""
    closed: Turn = NEVER
    suspects: tuple[DeviceId, ...] = ()
    next_attempt: int = 1
    spoilt: tuple[int, int] = (0, 0)
    gather_until: float | None = None
    start_by: float | None = None
    plan: ScheduleState = ScheduleState()
    ahead_s: float = 0.0
    paused: bool = False
    ends: str = ""
    compression_errors: CompressionErrors = CompressionErrors()  # noqa: RUF009 - frozen
    spent: SpentBudget = SpentBudget()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        self.pays: Callable[[DeviceReport], bool] = lambda _: False  # whether training would, see `Schedule`
        self._groups: Groups | None = None
        self._changed: set[DeviceId] = set()

    @property
    def groups(self) -> Groups:
        """Who could train, who is awaited and the like."""
        if self._groups is None:
            self._groups = Groups(self.members, self)
        return self._groups

    @property
    def turn(self) -> Turn:
        """The asking that runs or comes next."""
        return Turn(self.rounds_done + 1, self.attempt)

    @property
    def start_is_overdue(self) -> bool:
        """Whether round 1 waits for no further device any more, see `start_by`."""
        return self.start_by is not None and self.seen_at >= self.start_by

    @property
    def running(self) -> bool:
        """Whether a round, or the final evaluation, is open."""
        return self.stage in ("training", "rehearsing")

    @property
    def replied(self) -> tuple[DeviceId, ...]:
        """Participants whose update was accepted, ascending."""
        return tuple(sorted(self.groups.replied))

    @property
    def awaited(self) -> Iterator[DeviceId]:
        """Participants that may still answer, there or not, ascending."""
        return iter(sorted(self.groups.awaited))

    def is_listed(self, device: DeviceId) -> bool:
        """Whether this device is among `participants`."""
        index = bisect_left(self.participants, device)
        return index < len(self.participants) and self.participants[index] == device

    def takes_part(self, device: DeviceId) -> bool:
        """Whether this device is one of the open round's participants."""
        return self.running and self.is_listed(device)

    def awaits(self, device: DeviceId) -> bool:
        """Whether the open round still waits for this device's answer."""
        if not self.takes_part(device):
            return False
        member = self.members[device]
        return member.answer is None and (self.stage == "rehearsing" or not member.left)

    def awaited_turn(self, device: DeviceId) -> Turn | None:
        """The task that the device is expected to answer; None: none."""
        return self.members[device].asked if self.awaits(device) else None

    def member(self, device: DeviceId) -> Member:
        """What is known of a device; of one never heard of, nothing."""
        return self.members.get(device, _STRANGER)

    def put(self, device: DeviceId, **changes: Any) -> None:
        """Change these fields of one device; it may be new."""
        self.members[device] = replace(self.member(device), **changes)
        self._changed.add(device)
        if self._groups is not None:
            self._groups.place((device,), self)

    def change(self, **fields: Any) -> None:
        """Change fields of the run itself."""
        moved: set[DeviceId] = set()
        if self._groups is not None and not _PARTS.isdisjoint(fields):
            moved.update(self.participants, fields.get("participants", ()), self._groups.declined)
        for name, value in fields.items():
            setattr(self, name, value)
        if self._groups is not None:
            self._groups.place(moved, self)

    def count(self, name: str, times: int = 1) -> None:
        """So many more of `name`."""
        self.counters[name] = self.counters.get(name, 0) + times

    def take_changed(self) -> set[DeviceId]:
        """The devices that `put` changed since this was asked last."""
        changed, self._changed = self._changed, set()
        return changed

    def copy(self) -> Self:
        """The state as it is now, for good."""
        return replace(self, members=dict(self.members), counters=dict(self.counters))
