"""The round engine's complete state, as one record that msgspec can store."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Self

from msgspec import UNSET

from fleetune.coordinator.rounds.compression_error import CompressionErrors
from fleetune.coordinator.rounds.member_groups import Groups
from fleetune.coordinator.rounds.stages import Stage, Transition, after
from fleetune.protocols.method.choice import Budget, DeviceReport, value_byte_share
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.wire.identity import Identity
from fleetune.protocols.wire.messages import TransferKey

Answer = Literal["update", "declined", "expired"]


class RoundAttempt(NamedTuple):
    """Number and attempt of a round. A later attempt compares greater."""

    number: int
    attempt: int

    @classmethod
    def of(cls, key: TransferKey) -> Self:
        """Return the round and attempt to which a payload belongs."""
        return cls(key.round, key.attempt)


NEVER = RoundAttempt(0, 0)


@dataclass(frozen=True)
class ScheduleState:
    """The engine's state of the run's [schedule].

    Attributes:
        due: True if a round is due and has not closed yet.
        since: when the last round became due, on the run's clock; None if none was due yet.
    """

    due: bool = False
    since: float | None = None


@dataclass(frozen=True)
class Observed:
    """Measurements of a device by the coordinator, or reported with its last reply; None where unknown.

    Attributes:
        asked_at: when its latest task was assigned, on the run's clock.
        took_s: seconds from its last task to the reply.
        loss: training loss of its last reply.
        compression_error: compression error of its last update (see `RoundCost`).
        missed: number of deadlines missed in a row, see `coordinator.rounds.policies.unresponsive`.
        seen_at: when it was last known to be connected, on the run's clock; later if it is `ready`.
    """

    asked_at: float | None = None
    took_s: float | None = None
    loss: float | None = None
    compression_error: float | None = None
    missed: int = 0
    seen_at: float | None = None


@dataclass(frozen=True)
class Introduction:
    """What a device's presence message reports about the device.

    Attributes:
        identity: id, name, and how it is known; None if simulated or not heard yet (see
            `EngineState.identity`).
        agent: program and version of its agent; "" if simulated or not reported.
    """

    identity: Identity | None = None
    agent: str = ""


@dataclass(frozen=True)
class Member:
    """State of one device in the round engine.

    Attributes:
        report: the device's latest report; None if it refused the run without a report.
        admitted: True if the method has seen this report.
        ready: True if the device is connected and enrolled.
        left: True if it stopped early; it then takes part in the final evaluation only.
        refusal: reason why it refused to join the run.
        asked: round and attempt of its latest task; NEVER before the first.
        tasks: number of training tasks that it was asked to do. Each attempt counts, also if the device did
            not answer or the round was undone, because the task may have been done.
        answer: its answer to that task. "expired": it took too long (see
            `coordinator.rounds.policies.semi_asynchronous`).
        declined_round: the latest round it declined, 0 for none.
        declined_reason: reason why it declined.
        diverged: True if it declined because its training, or its task, was not finite.
        returning: True if it was connected when the coordinator stopped, and has not reconnected since.
        trained: True if its report is older than its last update, which has used the new samples of that
            report.
        assigned: the budget of its latest task, in runs with an objective.
        observed: measurements of its rounds, see `Observed`.
        introduction: its identity and agent program, see `Introduction`.
    """

    report: DeviceReport | None = None
    admitted: bool = False
    ready: bool = False
    left: bool = False
    refusal: str | None = None
    asked: RoundAttempt = NEVER
    tasks: int = 0
    answer: Answer | None = None
    declined_round: int = 0
    declined_reason: str = ""
    diverged: bool = False
    returning: bool = False
    trained: bool = False
    assigned: Budget | None = None
    observed: Observed = Observed()
    introduction: Introduction = Introduction()

    @property
    def stays(self) -> bool:
        """True if the device takes part in training, or would if it reconnected."""
        return not self.left and self.refusal is None

    @property
    def at_work(self) -> DeviceReport | None:
        """The device's report, with the ratio of its assigned task and the round duration predicted for that
        ratio.
        """
        report, assigned = self.report, self.assigned
        if report is None or assigned is None or report.affords is UNSET or not report.affords:
            return report
        candidate = next((one for one in report.affords if one.ratio == assigned.ratio), None)
        values = value_byte_share(report, assigned)
        round_s = report.round_s if candidate is None else candidate.seconds(assigned.local_work, values)
        part = "" if assigned.local_work == 1 else f", {assigned.local_work:.0%} of local training"
        why = f"p = {assigned.ratio:g}{part}: proposed; it affords up to p = {report.affords[-1].ratio:g}"
        return replace(report, ratio=assigned.ratio, round_s=round_s, reason=why)

    @property
    def is_unseen(self) -> bool:
        """True if the method has not seen the device's report yet."""
        return self.report is not None and self.refusal is None and not self.admitted


_STRANGER = Member()
_OBSERVED = Observed.__dataclass_fields__.keys()
OPEN = frozenset(("training", "aggregating", "evaluating"))  # stages in which a round is open
# changes of these fields can move a device to another group
_PARTS = {"stage", "rounds_done", "participants"}


@dataclass(frozen=True)
class Timing:
    """Deadlines and other due times of the engine, on the run's clock; None where nothing is due.

    Attributes:
        until: the end of the open round's time; between rounds, the time of the next check.
        span_s: time limit of the round that opened last, in seconds.
        extended: how often the open window was extended.
        seen_at: the time of the latest event.
        ahead_s: seconds that the time of day is ahead of `now`.
        gather_until: no round opens before this time, so that devices can reconnect after a restart.
        start_by: when round 1 opens with the devices that are connected, if `round.start_with` is not set.
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
    """Rounds that were tried again, or may be tried again.

    Attributes:
        closed: the round that closed last, while it can be rolled back; NEVER if no round can.
        suspects: devices with an outlying update-norm ratio in that round.
        next_attempt: first attempt number of the round after the open one; attempt numbers are not reused.
        failed: the round that failed or was rolled back last, and the number of its failures.
    """

    closed: RoundAttempt = NEVER
    suspects: tuple[DeviceId, ...] = ()
    next_attempt: int = 1
    failed: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Ending:
    """Why and how the run ends.

    Attributes:
        ends: why no further round opens except the final evaluation; "" if more rounds follow.
        reason: why training has ended; "" if it has not.
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
    """State of the whole run in the round engine.

    Only the engine changes this state, and only with `change`, `put` and `count`. So an event costs as much
    as it changes, regardless of the number of devices. Other code reads the state, and uses `copy` to store
    it. Members are immutable: a change replaces them.

    Attributes:
        stage: see `coordinator.rounds.stages`; only `move` changes it.
        rounds_done: training rounds that were aggregated.
        attempt: attempt at round `rounds_done + 1`, which is open or comes next.
        most_tasks: the largest number of training tasks that any device was asked to do, also of a device
            that was forgotten since.
        participants: participants of the open round, ascending; in semi-asynchronous runs, devices at work or
            with a reply.
        timing: due times, see `Timing`.
        retries: rounds that are tried again.
        members: every device that was ever seen.
        counters: event counts: replies and declines dropped, by rejection reason; `declined` rounds,
            `refused` runs, `abandoned` attempts, devices `gone`.
        ending: why the run ends.
        plan: state of the run's schedule.
        paused: True if no round may open.
        compression_errors: reported errors of the run's encodings; only in runs with an objective.
    """

    stage: Stage = "waiting"
    rounds_done: int = 0
    attempt: int = 1
    most_tasks: int = 0
    participants: tuple[DeviceId, ...] = ()
    timing: Timing = Timing()
    members: dict[DeviceId, Member] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    ending: Ending = Ending()
    retries: Retries = Retries()
    plan: ScheduleState = ScheduleState()
    paused: bool = False
    compression_errors: CompressionErrors = CompressionErrors()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        self._groups: Groups | None = None
        self._changed: set[DeviceId] = set()

    def group(self, pays: Callable[[DeviceReport], bool]) -> None:
        """Build the groups of devices. `pays(report)`: True if training on that device would pay, see
        `Schedule`.
        """
        self._groups = Groups(self.members, self, pays)

    @property
    def groups(self) -> Groups:
        """Groups of devices, such as those that could train or have yet to answer."""
        if self._groups is None:
            self._groups = Groups(self.members, self)
        return self._groups

    @property
    def round_attempt(self) -> RoundAttempt:
        """The round and attempt that is open or comes next."""
        return RoundAttempt(self.rounds_done + 1, self.attempt)

    @property
    def start_is_overdue(self) -> bool:
        """True if round 1 no longer waits for further devices, see `Timing.start_by`."""
        return self.timing.start_by is not None and self.timing.seen_at >= self.timing.start_by

    @property
    def running(self) -> bool:
        """True if a round, or the final evaluation, is open."""
        return self.stage in OPEN

    @property
    def replied(self) -> tuple[DeviceId, ...]:
        """Participants whose update was accepted, ascending."""
        return tuple(sorted(self.groups.replied))

    @property
    def awaited(self) -> Iterator[DeviceId]:
        """Participants that may still answer, connected or not, ascending."""
        return iter(sorted(self.groups.awaited))

    def is_listed(self, device: DeviceId) -> bool:
        """True if this device is among `participants`."""
        index = bisect_left(self.participants, device)
        return index < len(self.participants) and self.participants[index] == device

    def takes_part(self, device: DeviceId) -> bool:
        """True if this device is one of the open round's participants."""
        return self.running and self.is_listed(device)

    def awaits(self, device: DeviceId) -> bool:
        """True if the open round still waits for this device's answer."""
        if not self.takes_part(device):
            return False
        member = self.members[device]
        return member.answer is None and (self.stage == "evaluating" or not member.left)

    def awaited_attempt(self, device: DeviceId) -> RoundAttempt | None:
        """Return round and attempt of the task that the device should answer next; None if there is none."""
        return self.members[device].asked if self.awaits(device) else None

    def member(self, device: DeviceId) -> Member:
        """Return the state of a device; an empty `Member` if the device is unknown."""
        return self.members.get(device, _STRANGER)

    def identity(self, device: DeviceId) -> Identity:
        """Return a device's id, name and how it is known, as far as the device has introduced itself."""
        return self.member(device).introduction.identity or Identity.of(device)

    def put(self, device: DeviceId, **changes: Any) -> None:
        """Change these fields of one device's `Member`, or of its `Observed`. The device may be new."""
        member = self.member(device)
        seen = {name: changes.pop(name) for name in _OBSERVED & changes.keys()}
        if seen:
            changes["observed"] = replace(member.observed, **seen)
        self.members[device] = replace(member, **changes)
        self._changed.add(device)
        if self._groups is not None:
            self._groups.place((device,), self)

    def forget(self, device: DeviceId, *, restart: bool) -> None:
        """Remove a device; with `restart`, the open round is tried again without it.

        Call this between two processes' work on the run: the groups are not kept up to date.
        """
        self._groups = None
        self.members.pop(device, None)
        self._changed.discard(device)
        participants, suspects = (
            tuple(one for one in devices if one != device)
            for devices in (self.participants, self.retries.suspects)
        )
        self.change(participants=participants, suspects=suspects)
        if restart:
            self.move("round abandoned", attempt=self.attempt + 1, participants=(), until=None)

    def move(self, transition: Transition, **fields: Any) -> None:
        """Change to the stage that the table of transitions gives, and change these fields of the run."""
        stage = after(self.stage, transition)
        if {stage, self.stage} == {"training", "aggregating"}:
            self.stage = stage  # no device changes its group, so the groups stay as they are
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
        """Add `times` to the counter `name`."""
        self.counters[name] = self.counters.get(name, 0) + times

    def take_changed(self) -> set[DeviceId]:
        """Return the devices that `put` changed since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def copy(self) -> Self:
        """Return a snapshot that later changes do not affect."""
        return replace(self, members=dict(self.members), counters=dict(self.counters))
