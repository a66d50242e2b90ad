"""Computes the status of a run and its devices at one moment from the engine's state and closed rounds."""

from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from statistics import median
from typing import Literal

from msgspec import Struct, field
from msgspec.structs import replace

from fleetune.coordinator.extensions.rollout import Rollout
from fleetune.coordinator.metrics.adoption import LatestAdoption
from fleetune.coordinator.metrics.diagnostics import diagnostics_line
from fleetune.coordinator.metrics.outliers import LatestOutliers
from fleetune.coordinator.metrics.privacy import privacy_summary
from fleetune.coordinator.metrics.registry import AFTER, BEFORE, DURATION, PREDICTED, STEPS, shown_at
from fleetune.coordinator.metrics.summary import AdoptionSummary, PrivacySummary
from fleetune.coordinator.queries.waiting import schedule_reason, waiting_reason
from fleetune.coordinator.rounds.engine_state import EngineState
from fleetune.coordinator.rounds.policies.deadline import keeps_pace
from fleetune.coordinator.rounds.policies.selection import needed, target
from fleetune.coordinator.rounds.records import DeviceRound, Ledger, RoundRecord
from fleetune.coordinator.rounds.stages import Stage
from fleetune.coordinator.run.run_clock import schedule_of
from fleetune.coordinator.run.run_events import Activity
from fleetune.protocols.conditions import Conditions
from fleetune.protocols.methods import diagnostics_of
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.tasks import task_of
from fleetune.protocols.tasks.scores import ACCURACY, Score
from fleetune.protocols.wire.identity import Identity, KnownBy

LATEST_ROUNDS = 100  # number of latest rounds whose scores a status contains
_RECENT_ROUNDS = 5  # number of latest rounds from which the next round's duration is predicted

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
        """Return the mean scores of a closed round."""
        return cls(record.number, BEFORE.of_round(record), AFTER.of_round(record))


class RunStatus(Struct, frozen=True, kw_only=True):
    """The status of a run at one moment. None means unknown or not applicable.

    Attributes:
        run: name of the run.
        running: True if a coordinator serves the run or a simulation executes it.
        stage: `waiting`, `training`, `aggregating`, `evaluating` (the final evaluation) or `finished`.
        round, rounds: number of the open or next round, and planned number of rounds; `rounds` is None for an
            open-ended run.
        devices, devices_there: number of known devices, and how many of them are connected and ready.
        waits: what the open or next round waits for; "" if it waits for nothing or the run is not served.
        broker_down_since: time at which the coordinator lost the broker, in seconds since 1970; None if it is
            connected or not running.
        problem: the problem that stops the run, in one line; "" if there is none.
        troubles: problems that do not stop the run, one line each.
        outliers: devices whose latest updates are mostly outlying, one line each.
        method: name of the run's method.
        attempt: number of the present attempt at the round.
        asked, replied, target: numbers of devices in the open round that got a task, that replied, and whose
            replies are needed to close the round.
        needed: number of devices that must be ready before the next round opens.
        scheduled: the schedule or pause that keeps the next round from opening; "" if neither applies.
        ended: reason why training is over; "" while it is not.
        round_left_s, round_span_s: time until the open round's deadline; total time of the round if its
            deadline was predicted.
        elapsed_s, remaining_s: time since the run began, and estimated time until its end.
        score: score by which the run's models are judged.
        scores: scores of the latest closed training rounds, ascending.
        diagnostics: the method's diagnostics in the latest round, in one line; "" if there are none.
        bytes_up, bytes_down: payload bytes of training so far.
        dense_up, dense_down: payload bytes that sending whole float32 models would have taken.
        refused: number of refused messages and replies, by kind.
        adoption: counts of the models that devices deploy, and gains over local-only.
        privacy: what the run has spent of [privacy]; None in runs without it.
        versions, latest_version: versions of the shared model that canaries test, as one full line and in
            short; "" if the run has no canaries.
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
    outliers: tuple[str, ...] = ()
    method: str
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
    privacy: PrivacySummary | None = None
    versions: str = ""
    latest_version: str = ""

    @property
    def over(self) -> bool:
        """True if the run is finished and no event will follow."""
        return self.stage == "finished" and not self.running


class DeviceStatus(Struct, frozen=True):
    """The status of a device of a run at one moment.

    Attributes:
        device: the device's id.
        doing: `receiving` its task or enrolment; `sending` its update; `working`: busy, details unknown;
            `ready`: connected without a task; `left`: left the run early; `refused`: refused the run; `away`:
            not connected, or unknown because no coordinator runs.
        part: the device's part in the open round; `idle` if it has no task or has left since.
        ready, left: True if it is connected and ready; True if it left early.
        connected: True if its agent is connected now and takes part in the run; None if no coordinator
            serves the run, because it is then unknown.
        board, agent: board profile, and program and version of its agent; "" if not reported.
        ratio, ratio_reason: ratio that the device uses, and the reason for it.
        num_samples: number of its training samples.
        predicted_round_s: duration of a round as the device predicts it.
        conditions: power, temperature and memory as last reported.
        refusal: reason why it refused the run; None if it did not.
        declined_round, declined_reason: latest round that it declined (0 for none), and the reason.
        progress: progress of its present activity, 0 to 1; None if unknown.
        before, after: scores of its latest reply, before and after local training.
        actual_s, predicted_s: actual and predicted duration of the round of its latest reply.
        bytes_up, bytes_down: payload bytes so far.
        name: the device's name for people; equal to `device` if the owner gave none.
        known_by: how the coordinator knows the device, see `Identity` and docs/security.md.
        metrics: metrics of its latest reply that the live view shows, and those of its step, by name.
        refused: number of its replies that were refused or truncated, by kind.
        state: its state in the registry of its fleet; "" if it is not registered there, or there is none.
            "ended": it was accepted, but its certificate or secret has ended, so it must join again.
        old_authority: True if it still needs the authority that is being replaced.
        tags: the operator's tags, from its invitation.
        joined_at, last_seen: when it joined the fleet, and when it was last known to be connected; seconds
            since 1970, None if unknown.
        certificate_ends_at: when its certificate ends, in seconds since 1970; None if it has none.
    """

    device: str
    doing: Doing
    part: Part = "idle"
    ready: bool = False
    left: bool = False
    connected: bool | None = None
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
    name: str = ""
    known_by: KnownBy = "claim"
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    refused: Mapping[str, int] = field(default_factory=dict)
    state: Literal["", "pending", "accepted", "revoked", "ended"] = ""
    old_authority: bool = False
    tags: tuple[str, ...] = ()
    joined_at: float | None = None
    last_seen: float | None = None
    certificate_ends_at: float | None = None

    @property
    def identity(self) -> Identity:
        """The device's id, name, and how the coordinator knows it."""
        return Identity(self.device, self.name or self.device, self.known_by)

    @property
    def reason(self) -> str:
        """Why the device refused the run or declined the open or next round; "" if it did neither."""
        if self.doing == "refused":
            return self.refusal or ""
        return self.declined_reason if self.doing == "declined" else ""


def at_rest(one: DeviceStatus, *, connected: bool | None) -> DeviceStatus:
    """Return the status of a device that is not connected (False), or of which that is unknown (None)."""
    doing: Doing = "refused" if one.refusal is not None else "away"
    return replace(one, doing=doing, part="idle", ready=False, connected=connected, progress=None)


def part_of(state: EngineState, device: str) -> Part:
    """Return the device's part in the open round."""
    member = state.members[device]
    if state.awaits(device):
        return "awaited"
    if not state.takes_part(device) or member.answer is None:
        return "idle"
    return "replied" if member.answer == "update" else "declined"


class StatusReader:
    """Computes the status of one run from the closed rounds that were added to it.

    Args:
        settings: settings of the run.
        num_parameters: number of parameters of the run's model.
    """

    def __init__(self, settings: RunSettings, num_parameters: int) -> None:
        self._settings = settings
        self._num_parameters = num_parameters
        self._schedule = schedule_of(settings.schedule)
        self._diagnostics = diagnostics_of(settings.method)
        self._scores: deque[RoundScore] = deque(maxlen=LATEST_ROUNDS)
        self._latest_diagnostics = ""
        self._closed_s = deque([0.0], maxlen=_RECENT_ROUNDS + 1)
        self._latest_replies: dict[str, DeviceRound] = {}
        self._adoption = LatestAdoption()
        self._outliers = LatestOutliers()

    def add(self, record: RoundRecord) -> None:
        """Add a closed round. After a restart, add the rounds that were closed before it first."""
        self._latest_replies.update(record.devices)
        self._adoption.add(record)
        self._outliers.add(record)
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
        """Return the status of the run.

        Args:
            state: state of the engine.
            ledger: ledger of the run.
            now: present time on the run's clock, in seconds.
            running: True if a coordinator serves the run.
            rollout: versions of the shared model; None if the run has no roll-out groups.
            problem: see `RunStatus`.
            broker_down_since: see `RunStatus`.
            troubles: see `RunStatus`.
        """
        settings = self._settings
        parts = [part_of(state, device) for device in state.participants]
        scheduled = schedule_reason(state, self._schedule, now)
        traffic = ledger.traffic.values()
        end = now if ledger.ended_at is None else ledger.ended_at
        elapsed_s = 0.0 if ledger.began_at is None else end - ledger.began_at
        until = state.timing.until if state.running else None
        predicted_deadline = until is not None and keeps_pace(settings.round, settings.objective)
        return RunStatus(
            run=settings.run.name,
            running=running,
            stage=state.stage,
            round=state.round_attempt.number,
            rounds=settings.run.last_round,
            devices=len(state.members),
            devices_there=sum(member.ready for member in state.members.values()) if running else 0,
            waits=scheduled or (waiting_reason(state, settings.round) if running else ""),
            broker_down_since=broker_down_since,
            problem=problem,
            troubles=troubles,
            outliers=self._outliers.lines(state),
            method=settings.method["name"],
            attempt=state.attempt,
            asked=len(parts),
            replied=parts.count("replied"),
            target=len(parts) if state.stage == "evaluating" else target(state, settings.round),
            needed=needed(state, settings.round),
            scheduled=scheduled,
            ended=(state.ending.reason or "") if state.stage == "finished" else "",
            round_left_s=None if until is None else until - now,
            round_span_s=state.timing.span_s if predicted_deadline else None,
            elapsed_s=elapsed_s,
            remaining_s=self._remaining_s(state, elapsed_s),
            score=task_of(settings.task).score,
            scores=tuple(self._scores),
            diagnostics=self._latest_diagnostics,
            bytes_up=sum(one.up for one in traffic),
            bytes_down=sum(one.down for one in traffic),
            dense_up=4 * self._num_parameters * sum(one.updates for one in traffic),
            dense_down=4 * self._num_parameters * sum(one.tasks for one in traffic),
            refused=ledger.refusals,
            adoption=self._adoption.summary(),
            privacy=None if settings.privacy is None else privacy_summary(settings.privacy, state),
            versions="" if rollout is None else rollout.words,
            latest_version="" if rollout is None else rollout.short,
        )

    def devices(
        self,
        state: EngineState,
        ledger: Ledger,
        activities: Mapping[str, Activity] | None = None,
        *,
        running: bool = True,
    ) -> tuple[DeviceStatus, ...]:
        """Return all devices that ever contacted the run, sorted by name.

        Args:
            state: state of the engine.
            ledger: ledger of the run.
            activities: present activity of each device that is known to be busy.
            running: True if a coordinator serves the run; without one, no device does anything for it.
        """
        busy = activities or {}
        found = (self._device(state, ledger, name, busy.get(name)) for name in sorted(state.members))
        return tuple(found) if running else tuple(at_rest(one, connected=None) for one in found)

    def _device(
        self, state: EngineState, ledger: Ledger, device: str, activity: Activity | None
    ) -> DeviceStatus:
        member, report = state.members[device], state.members[device].at_work
        doing, identity = _doing(state, device, activity), state.identity(device)
        last, traffic = self._latest_replies.get(device), ledger.traffic.get(device)
        predicted_s = report.round_s if report else None
        return DeviceStatus(
            device=device,
            doing=doing,
            part=part_of(state, device),
            ready=member.ready,
            left=member.left,
            connected=member.ready,
            board=report.board if report else "",
            agent=member.introduction.agent,
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
            name=identity.name,
            known_by=identity.known_by,
            metrics={one.name: one.of_reply(last) for one in (*shown_at("live"), *STEPS)} if last else {},
            refused=ledger.refusals_by_device.get(device, {}),
            last_seen=state.timing.seen_at if member.ready else member.observed.seen_at,
        )

    def _remaining_s(self, state: EngineState, elapsed_s: float) -> float | None:
        """Estimate the time until the run ends, in seconds; None if unknown.

        Each remaining round, and the final evaluation, is assumed to take as long as recent rounds.
        """
        closed, run = self._closed_s, self._settings.run
        if len(closed) < 2 or state.stage == "finished" or run.last_round is None:
            return None
        usual_s = median(after - before for before, after in pairwise(closed))
        to_close = run.last_round - state.round_attempt.number + 1 + int(run.final_evaluation)
        if state.stage == "evaluating":
            to_close = 1
        spent_s = min(usual_s, max(0.0, elapsed_s - closed[-1]))
        return to_close * usual_s - spent_s


def _doing(state: EngineState, device: str, activity: Activity | None) -> Doing:
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
