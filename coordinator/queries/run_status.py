"""The status of a run and of its devices at one moment, made from the engine's state and closed rounds."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

from msgspec import Struct, field

from fleetune.coordinator.extensions.rollout import Rollout
from fleetune.coordinator.metrics.adoption import LatestAdoption
from fleetune.coordinator.metrics.diagnostics import diagnostics_line
from fleetune.coordinator.metrics.registry import AFTER, BEFORE, DURATION, PREDICTED, shown_at
from fleetune.coordinator.metrics.summary import AdoptionSummary
from fleetune.coordinator.queries.waiting import schedule_reason, waiting_reason
from fleetune.coordinator.rounds.engine_state import EngineState
from fleetune.coordinator.rounds.policies.selection import needed, target
from fleetune.coordinator.rounds.records import DeviceRound, Ledger, RoundRecord
from fleetune.coordinator.rounds.stages import Stage
from fleetune.coordinator.run.run_clock import schedule_of
from fleetune.coordinator.run.run_events import Activity
from fleetune.protocols.conditions import Conditions
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.methods import diagnostics_of
from fleetune.protocols.settings.coordinator import RoundSection
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.tasks import task_of
from fleetune.protocols.tasks.scores import ACCURACY, Score

LATEST_ROUNDS = 100  # whose scores a status has
_RECENT_ROUNDS = 5  # whose duration predicts that of the next

Part = Literal["idle", "awaited", "replied", "declined"]
Doing = Literal[
    "sending",
    "training",
    "evaluating",
    "receiving",
    "working",
    "declined",
    "replied",
    "ready",
    "left",
    "refused",
    "away",
]


class RoundScore(Struct, frozen=True):
    """Mean scores of one closed round's replies, before and after local training."""

    number: int
    before: float | None
    after: float | None

    @classmethod
    def of(cls, record: RoundRecord) -> "RoundScore":
        """Of a closed round."""
        return cls(record.number, BEFORE.of_round(record), AFTER.of_round(record))


class RunStatus(Struct, frozen=True, kw_only=True):
    """A run at one moment. None: not known, or does not apply.

    Attributes:
        run: name of the run.
        running: whether a coordinator serves it, or a simulation runs it.
        stage: of the run: waiting, training, rehearsing (the final evaluation) or finished.
        round, rounds: the open or coming round, of how many; `rounds` is None for an open run.
        devices, devices_there: devices that are known, and those that are connected and ready.
        waits: what the open or coming round waits for; "": nothing, or nothing serves the run.
        broker_down_since: seconds of the epoch; None: connected, or nothing serves the run.
        problem: what keeps the run from going on, in one line; "": nothing.
        troubles: what is wrong although the run goes on, a line each.
        method: of the run.
        simulated: whether times are of a virtual clock.
        attempt: at the round.
        asked, replied, target: devices of the open round; it closes with `target` replies.
        needed: devices that must be there for the coming round to open.
        scheduled: why no round is open although devices may be there (schedule, pause); "": neither.
        ended: why training is over; "": it is not.
        round_left_s, round_span_s: time to the open round's deadline; and the time that a predicted deadline
            gave the round.
        elapsed_s, remaining_s: since the run began, and an estimate until its end.
        score: by which models are judged.
        scores: of the latest closed training rounds, ascending.
        diagnostics: of the method in the latest round, in one line; "": none.
        bytes_up, bytes_down: payload of training so far.
        dense_up, dense_down: the same as whole models in float32.
        refused: refused messages and replies, by kind.
        adoption: which models devices deploy.
        versions, latest_version: of a shared model that goes to canaries first, in one line and in short; "":
            the run has no canaries.
    """

    run: str
    running: bool = True
    stage: Stage
    round: int
    rounds: int | None
    devices: int = 0
    devices_there: int = 0
    waits: str = ""
    broker_down_since: float | None = None
    problem: str = ""
    troubles: tuple[str, ...] = ()
    method: str
    simulated: bool = False
    attempt: int = 1
    asked: int = 0
    replied: int = 0
    target: int = 0
    needed: int = 1
    scheduled: str = ""
    ended: str = ""
    round_left_s: float | None = None
    round_span_s: float | None = None
    elapsed_s: float = 0.0
    remaining_s: float | None = None
    score: Score = ACCURACY
    scores: tuple[RoundScore, ...] = ()
    diagnostics: str = ""
    bytes_up: int = 0
    bytes_down: int = 0
    dense_up: int = 0
    dense_down: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    adoption: AdoptionSummary | None = None
    versions: str = ""
    latest_version: str = ""

    @property
    def over(self) -> bool:
        """Whether the run is finished, and nothing more will come."""
        return self.stage == "finished" and not self.running


class DeviceStatus(Struct, frozen=True):
    """A device of a run at one moment.

    Attributes:
        device: its name.
        doing: `receiving` its task or enrolment, `sending` its update; `working`: busy, no more is known;
            `ready`: there and not asked; `left` early; `refused` the run; `away`: not connected.
        part: in the open round; `idle`: not asked, or it left meanwhile.
        ready, left: whether it is connected and ready, and whether it left early.
        board, agent: what it runs on, and program and version of its agent; "": not reported.
        ratio, ratio_reason: that it works at, and why.
        num_samples: that it trains on.
        predicted_round_s: what it predicts a round to take.
        conditions: power, temperature and memory as it reported them.
        refusal: why it will not join the run; None: it has not refused.
        declined_round, declined_reason: the latest round that it declined, 0 for none, and why.
        progress: of what it is doing, 0 to 1; None: not known.
        before, after: scores of its latest reply.
        actual_s, predicted_s: what its latest reply's round took, and what it predicted for that.
        bytes_up, bytes_down: payload so far.
        metrics: of its latest reply, by name: those that the live view shows.
        refused: replies of it that were refused or cut, by kind.
    """

    device: DeviceId
    doing: Doing
    part: Part = "idle"
    ready: bool = False
    left: bool = False
    board: str = ""
    agent: str = ""
    ratio: float | None = None
    ratio_reason: str = ""
    num_samples: int | None = None
    predicted_round_s: float | None = None
    conditions: Conditions | None = None
    refusal: str | None = None
    declined_round: int = 0
    declined_reason: str = ""
    progress: float | None = None
    before: float | None = None
    after: float | None = None
    actual_s: float | None = None
    predicted_s: float | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    refused: Mapping[str, int] = field(default_factory=dict)

    @property
    def reason(self) -> str:
        """Why it refused the run, or declined the open or coming round; "": neither."""
        if self.doing == "refused":
            return self.refusal or ""
        return self.declined_reason if self.doing == "declined" else ""


@dataclass(frozen=True)
class OpenRound:
    """The open round, or the coming one while the run waits.

    Attributes:
        asked, replied, declined, awaited: numbers of devices; 0 while no round is open.
        target: the round closes at once with so many replies.
        until: its deadline, or when the engine looks again; on the run's clock.
    """

    stage: Stage
    number: int
    attempt: int
    asked: int
    replied: int
    declined: int
    awaited: int
    target: int
    until: float | None

    @classmethod
    def of(cls, state: EngineState, settings: RoundSection) -> "OpenRound":
        """As the engine's state has it."""
        parts = [part_of(state, device) for device in state.participants]
        return cls(
            stage=state.stage,
            number=state.round_attempt.number,
            attempt=state.attempt,
            asked=len(parts),
            replied=parts.count("replied"),
            declined=parts.count("declined"),
            awaited=parts.count("awaited"),
            target=len(parts) if state.stage == "evaluating" else target(state, settings),
            until=state.timing.until,
        )


def part_of(state: EngineState, device: DeviceId) -> Part:
    """What a device does in the open round."""
    member = state.members[device]
    if state.awaits(device):
        return "awaited"
    if not state.takes_part(device) or member.answer is None:
        return "idle"
    return "replied" if member.answer == "update" else "declined"


class StatusReader:
    """Reads the status of one run; it remembers what is needed of closed rounds.

    Args:
        settings: of the run.
        num_parameters: of its model.
        simulated: whether times are of a virtual clock.
    """

    def __init__(self, settings: RunSettings, num_parameters: int, *, simulated: bool = False) -> None:
        self._settings = settings
        self._num_parameters = num_parameters
        self._simulated = simulated
        self._schedule = schedule_of(settings.schedule)
        self._diagnostics = diagnostics_of(settings.method)
        self._scores: deque[RoundScore] = deque(maxlen=LATEST_ROUNDS)
        self._latest_diagnostics = ""
        self._closed_s = deque([0.0], maxlen=_RECENT_ROUNDS + 1)
        self._latest_replies: dict[DeviceId, DeviceRound] = {}
        self._adoption = LatestAdoption()

    def add(self, record: RoundRecord) -> None:
        """Take in a closed round; after a restart, first those from before."""
        self._latest_replies.update(record.devices)
        self._adoption.add(record)
        if not record.final_evaluation:
            self._scores.append(RoundScore.of(record))
            self._closed_s.append(record.closed_s)
            self._latest_diagnostics = diagnostics_line(record, self._diagnostics)

    def status(
        self,
        state: EngineState,
        ledger: Ledger,
        now: float,
        *,
        running: bool = True,
        rollout: Rollout | None = None,
        problem: str = "",
        broker_down_since: float | None = None,
        troubles: tuple[str, ...] = (),
    ) -> RunStatus:
        """The run at `now`, in seconds on its clock.

        Args:
            state: of the engine.
            ledger: of the run.
            now: see above.
            running: whether a coordinator serves the run.
            rollout: of the shared model's versions; None: the run has no roll-out groups.
            problem: see `RunStatus`, likewise the others.
            broker_down_since: likewise.
            troubles: likewise.
        """
        settings = self._settings
        open_round = OpenRound.of(state, settings.round)
        scheduled = schedule_reason(state, self._schedule, now)
        traffic = ledger.traffic.values()
        end = now if ledger.ended_at is None else ledger.ended_at
        elapsed_s = 0.0 if ledger.began_at is None else end - ledger.began_at
        until = open_round.until if state.running else None
        predicted_deadline = until is not None and settings.round.deadline == "predicted"
        return RunStatus(
            run=settings.run.name,
            running=running,
            stage=state.stage,
            round=open_round.number,
            rounds=settings.run.last_round,
            devices=len(state.members),
            devices_there=sum(member.ready for member in state.members.values()) if running else 0,
            waits=scheduled or (waiting_reason(state, settings.round) if running else ""),
            broker_down_since=broker_down_since,
            problem=problem,
            troubles=troubles,
            method=settings.method["name"],
            simulated=self._simulated,
            attempt=open_round.attempt,
            asked=open_round.asked,
            replied=open_round.replied,
            target=open_round.target,
            needed=needed(state, settings.round),
            scheduled=scheduled,
            ended=(state.ending.reason or "") if state.stage == "finished" else "",
            round_left_s=None if until is None else until - now,
            round_span_s=state.timing.span_s if predicted_deadline else None,
            elapsed_s=elapsed_s,
            remaining_s=self._remaining_s(open_round, elapsed_s),
            score=task_of(settings.task).score,
            scores=tuple(self._scores),
            diagnostics=self._latest_diagnostics,
            bytes_up=sum(one.up for one in traffic),
            bytes_down=sum(one.down for one in traffic),
            dense_up=4 * self._num_parameters * sum(one.updates for one in traffic),
            dense_down=4 * self._num_parameters * sum(one.tasks for one in traffic),
            refused=ledger.refusals,
            adoption=self._adoption.summary(),
            versions="" if rollout is None else rollout.words,
            latest_version="" if rollout is None else rollout.short,
        )

    def devices(
        self, state: EngineState, ledger: Ledger, activities: Mapping[DeviceId, Activity] | None = None
    ) -> tuple[DeviceStatus, ...]:
        """All devices that the run ever heard of, by name; `activities` are of devices known to be busy."""
        busy = activities or {}
        return tuple(self._device(state, ledger, name, busy.get(name)) for name in sorted(state.members))

    def _device(
        self, state: EngineState, ledger: Ledger, device: DeviceId, activity: Activity | None
    ) -> DeviceStatus:
        member, report = state.members[device], state.members[device].at_work
        doing = _doing(state, device, activity)
        last, traffic = self._latest_replies.get(device), ledger.traffic.get(device)
        predicted_s = report.round_s if report else None
        return DeviceStatus(
            device=device,
            doing=doing,
            part=part_of(state, device),
            ready=member.ready,
            left=member.left,
            board=report.board if report else "",
            agent=member.agent,
            ratio=report.ratio if report else None,
            ratio_reason=report.reason if report else "",
            num_samples=report.num_samples if report else None,
            predicted_round_s=predicted_s,
            conditions=report.conditions if report else None,
            refusal=member.refusal,
            declined_round=member.declined_round,
            declined_reason=member.declined_reason,
            progress=activity.fraction if activity and activity.doing == doing else None,
            before=BEFORE.of_reply(last) if last else None,
            after=AFTER.of_reply(last) if last else None,
            actual_s=DURATION.of_reply(last) if last else None,
            predicted_s=PREDICTED.of_reply(last) if last else predicted_s,
            bytes_up=traffic.up if traffic else 0,
            bytes_down=traffic.down if traffic else 0,
            metrics={one.name: one.of_reply(last) for one in shown_at("live")} if last else {},
            refused=ledger.refusals_by_device.get(device, {}),
        )

    def _remaining_s(self, open_round: OpenRound, elapsed_s: float) -> float | None:
        """Time of the rounds still to close, the final evaluation included, each as long as recent ones."""
        closed, run = self._closed_s, self._settings.run
        if len(closed) < 2 or open_round.stage == "finished" or run.last_round is None:
            return None
        usual_s = median(after - before for before, after in pairwise(closed))
        to_close = run.last_round - open_round.number + 1 + int(run.final_evaluation)
        if open_round.stage == "evaluating":
            to_close = 1
        spent_s = min(usual_s, max(0.0, elapsed_s - closed[-1]))
        return to_close * usual_s - spent_s


def _doing(state: EngineState, device: DeviceId, activity: Activity | None) -> Doing:
    member, part = state.members[device], part_of(state, device)
    if member.refusal is not None:
        return "refused"
    if part in ("replied", "declined"):
        return "replied" if part == "replied" else "declined"
    if not member.ready:
        return "away"
    if part == "awaited":
        return activity.doing if activity else "working"
    if member.left:
        return "left"
    return (
        "declined"
        if member.declined_round == state.round_attempt.number and member.declined_reason
        else "ready"
    )
