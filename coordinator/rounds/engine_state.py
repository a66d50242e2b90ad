"""Everything the round engine remembers, as one record that msgspec can carry."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Self

from msgspec import UNSET

from fleetune.coordinator.rounds.compression_error import CompressionErrors
from fleetune.coordinator.rounds.member_groups import Groups
from fleetune.coordinator.rounds.spent_budget import SpentBudget
from fleetune.coordinator.rounds.stages import Stage, Transition, after
from fleetune.protocols.method.choice import Budget, DeviceReport, values_sent
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.wire.messages import TransferKey

Answer = Literal["update", "declined", "expired"]


class RoundAttempt(NamedTuple):
    """One asking; later turns are greater."""

    number: int
    attempt: int

    @classmethod
    def of(cls, key: TransferKey) -> Self:
        """What a payload is for."""
        return cls(key.round, key.attempt)


NEVER = RoundAttempt(0, 0)


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
class Observed:
    """What the coordinator has seen of a device's rounds; None: not known.

    Attributes:
        asked_at: when it was asked last, on the run's clock.
        took_s: how long its last reply took.
        loss: that its last reply reported.
        change: how much its last update changed what it was sent.
        compression_error: of its last update (see `RoundCost`).
        stretch: how many times longer than it says a round is expected to take it, at least 1.
        missed: deadlines that it missed in a row, see `coordinator.rounds.policies.unresponsive`.
    """

    asked_at: float | None = None
    took_s: float | None = None
    loss: float | None = None
    change: float | None = None
    compression_error: float | None = None
    stretch: float = 1.0
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
        returning: it was there when the coordinator stopped, and has not been heard of since it is back.
        trained: its report is older than its last update, so that what that calls new was trained on.
        assigned: with an objective: what its latest task was planned at.
        observed: what the coordinator has seen of its rounds.
        agent: program and version of its agent, as its presence reports; "": not reported, or simulated.
    """

    report: DeviceReport | None = None
    admitted: bool = False
    ready: bool = False
    left: bool = False
    refusal: str | None = None
    asked: RoundAttempt = NEVER
    answer: Answer | None = None
    declined_round: int = 0
    declined_reason: str = ""
    diverged: bool = False
    returning: bool = False
    trained: bool = False
    assigned: Budget | None = None
    observed: Observed = Observed()
    agent: str = ""

    @property
    def stays(self) -> bool:
        """Whether it is, or would be if it came back, part of the training."""
        return not self.left and self.refusal is None

    @property
    def at_work(self) -> DeviceReport | None:
        """Its report, with the ratio that it is asked to work at and the seconds that it expects of it."""
        report, assigned = self.report, self.assigned
        if report is None or assigned is None or report.affords is UNSET or not report.affords:
            return report
        told = next((one for one in report.affords if one.ratio == assigned.ratio), None)
        values = values_sent(report, assigned)
        round_s = report.round_s if told is None else told.seconds(assigned.local_work, values)
        part = "" if assigned.local_work == 1 else f", {assigned.local_work:.0%} of local training"
        why = f"p = {assigned.ratio:g}{part}: proposed; it affords up to p = {report.affords[-1].ratio:g}"
        return replace(report, ratio=assigned.ratio, round_s=round_s, reason=why)

    @property
    def is_unseen(self) -> bool:
        """Whether the method has yet to see its report."""
        return self.report is not None and self.refusal is None and not self.admitted


_STRANGER = Member()
_OBSERVED = Observed.__dataclass_fields__.keys()
OPEN = frozenset(("training", "aggregating", "evaluating"))  # stages in which a round is open
_PARTS = {"stage", "rounds_done", "participants"}  # what decides on a device's part, besides its member


@dataclass(frozen=True)
class Timing:
    """When something is due, on the run's clock; None: no such time.

    Attributes:
        until: when the open round is over; while waiting, when to look again.
        span_s: how long the round that opened last is given.
        extended: how often the open window was extended.
        seen_at: the latest `now`.
        ahead_s: by how much the time of day is ahead of `now`.
        gather_until: until then no round opens, so that devices can come back after a restart.
        start_by: where `round.start_with` is not set: when round 1 opens with the devices that are there.
    """

    until: float | None = None
    span_s: float | None = None
    extended: int = 0
    seen_at: float = 0.0
    ahead_s: float = 0.0
    gather_until: float | None = None
    start_by: float | None = None


@dataclass(frozen=True)
class Retries:
    """Rounds that were, or may be, tried again.

    Attributes:
        closed: the round that closed last, as long as it can be rolled back; NEVER: none can.
        suspects: devices whose update-norm ratio stood out in it.
        next_attempt: of the round after the open one: an attempt that was asked before is not asked again.
        failed: the round that failed or was rolled back last, and how often.
    """

    closed: RoundAttempt = NEVER
    suspects: tuple[DeviceId, ...] = ()
    next_attempt: int = 1
    failed: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Ending:
    """Why the run comes to its end.

    Attributes:
        ends: why no further round opens, but for the final evaluation; "": they do.
        reason: why training has ended; "": it has not.
    """

    ends: str = ""
    reason: str = ""


_PART_OF = {
    **dict.fromkeys(Timing.__dataclass_fields__, "timing"),
    **dict.fromkeys(Retries.__dataclass_fields__, "retries"),
    **dict.fromkeys(Ending.__dataclass_fields__, "ending"),
}


@dataclass
class EngineState:
    """The run so far.

    The engine changes it, by `change`, `put` and `count` alone, so that an event costs what it changed and
    not what there is; others read it, and `copy` it to keep it. Members are values: they are replaced.

    Attributes:
        stage: see `coordinator.rounds.stages`; only `move` changes it.
        rounds_done: training rounds that were aggregated.
        attempt: of round `rounds_done + 1`, the one that runs or comes next.
        participants: of the round that runs, ascending; semi-asynchronously, who works or has replied.
        timing: when something is due.
        retries: rounds that are tried again.
        members: every device ever heard of.
        counters: how often: replies and declines dropped, by rejection; `declined` rounds, `refused` runs,
            `abandoned` attempts, devices `gone`.
        ending: why the run comes to its end.
        plan: what is remembered of the run's schedule.
        paused: no round opens.
        compression_errors: with an objective: of the run's encodings, as devices report them.
        spent: what the run has spent.
    """

    stage: Stage = "waiting"
    rounds_done: int = 0
    attempt: int = 1
    participants: tuple[DeviceId, ...] = ()
    timing: Timing = Timing()
    members: dict[DeviceId, Member] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    ending: Ending = Ending()
    retries: Retries = Retries()
    plan: ScheduleState = ScheduleState()
    paused: bool = False
    compression_errors: CompressionErrors = CompressionErrors()  # noqa: RUF009 - frozen
    spent: SpentBudget = SpentBudget()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        self._groups: Groups | None = None
        self._changed: set[DeviceId] = set()

    def group(self, pays: Callable[[DeviceReport], bool]) -> None:
        """Group the devices; `pays`: whether training on a device would pay, see `Schedule`."""
        self._groups = Groups(self.members, self, pays)

    @property
    def groups(self) -> Groups:
        """Who could train, who is awaited and the like."""
        if self._groups is None:
            self._groups = Groups(self.members, self)
        return self._groups

    @property
    def round_attempt(self) -> RoundAttempt:
        """The asking that runs or comes next."""
        return RoundAttempt(self.rounds_done + 1, self.attempt)

    @property
    def start_is_overdue(self) -> bool:
        """Whether round 1 waits for no further device any more, see `start_by`."""
        return self.timing.start_by is not None and self.timing.seen_at >= self.timing.start_by

    @property
    def running(self) -> bool:
        """Whether a round, or the final evaluation, is open."""
        return self.stage in OPEN

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
        return member.answer is None and (self.stage == "evaluating" or not member.left)

    def awaited_attempt(self, device: DeviceId) -> RoundAttempt | None:
        """The task that the device is expected to answer; None: none."""
        return self.members[device].asked if self.awaits(device) else None

    def member(self, device: DeviceId) -> Member:
        """What is known of a device; of one never heard of, nothing."""
        return self.members.get(device, _STRANGER)

    def put(self, device: DeviceId, **changes: Any) -> None:
        """Change these fields of one device, or of what was observed of it; it may be new."""
        member = self.member(device)
        seen = {name: changes.pop(name) for name in _OBSERVED & changes.keys()}
        if seen:
            changes["observed"] = replace(member.observed, **seen)
        self.members[device] = replace(member, **changes)
        self._changed.add(device)
        if self._groups is not None:
            self._groups.place((device,), self)

    def move(self, transition: Transition, **fields: Any) -> None:
        """Go to the stage that the table has for this transition, and change these fields of the run."""
        stage = after(self.stage, transition)
        if {stage, self.stage} == {"training", "aggregating"}:
            self.stage = stage  # no device's part changes, so that no group needs to be looked at
            self.change(**fields)
        else:
            self.change(stage=stage, **fields)

    def change(self, **fields: Any) -> None:
        """Change fields of the run itself, or of its timing and retries."""
        moved: set[DeviceId] = set()
        if self._groups is not None and not _PARTS.isdisjoint(fields):
            moved.update(self.participants, fields.get("participants", ()), self._groups.declined)
        for name, value in fields.items():
            part = _PART_OF.get(name)
            if part is None:
                setattr(self, name, value)
            else:
                setattr(self, part, replace(getattr(self, part), **{name: value}))
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
