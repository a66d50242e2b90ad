"""From the state of a run to the snapshots that the live view shows."""

from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from statistics import median

from fleetune.coordinator.metrics.adoption import adoption_of_reply, adoption_over
from fleetune.coordinator.metrics.registry import AFTER, BEFORE, DURATION, EXPECTED, shown_at
from fleetune.coordinator.metrics.summary import DeviceAdoption
from fleetune.coordinator.reports.diagnostics.words import diagnostics_line
from fleetune.coordinator.reports.due import held_by
from fleetune.coordinator.reports.progress import DeviceView, RoundView, view_devices, view_round
from fleetune.coordinator.reports.snapshot import DeviceLine, Doing, RoundPoint, Snapshot, point_of
from fleetune.coordinator.rounds.engine_state import EngineState
from fleetune.coordinator.rounds.policies.selection import needed
from fleetune.coordinator.rounds.records import DeviceRound, Ledger, RoundRecord
from fleetune.coordinator.rounds.rollout import Rollout
from fleetune.coordinator.run.run_clock import schedule_of
from fleetune.coordinator.run.run_events import Activity
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.methods import diagnostics_of
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.tasks import task_of

_RECENT_ROUNDS = 5
_CURVE_ROUNDS = 100  # a view shows fewer


class Watch:
    """Follows one run.

    Args:
        settings: of the run.
        parameters: of its model.
        simulated: times are of a virtual clock.
    """

    def __init__(self, settings: RunSettings, parameters: int, *, simulated: bool = False) -> None:
        self._settings = settings
        self._parameters = parameters
        self._schedule = schedule_of(settings.schedule)
        self._simulated = simulated
        self._diagnostics = diagnostics_of(settings.method)
        self._curve: deque[RoundPoint] = deque(maxlen=_CURVE_ROUNDS)
        self._latest_diagnostics = ""
        self._closed_s = deque([0.0], maxlen=_RECENT_ROUNDS + 1)
        self._last: dict[DeviceId, DeviceRound] = {}
        self._adoption: dict[DeviceId, DeviceAdoption] = {}

    def note(self, record: RoundRecord) -> None:
        """Take in a closed round; after a restart, those from before."""
        self._last.update(record.devices)
        for device, reply in record.devices.items():
            if (told := adoption_of_reply(reply)) is not None:
                self._adoption[device] = told
        if not record.final_evaluation:
            self._curve.append(point_of(record))
            self._closed_s.append(record.closed_s)
            self._latest_diagnostics = diagnostics_line(record, self._diagnostics)

    def snapshot(
        self,
        state: EngineState,
        ledger: Ledger,
        now: float,
        activities: Mapping[DeviceId, Activity] | None = None,
        problem: str | None = None,
        rollout: Rollout | None = None,
    ) -> Snapshot:
        """The run as it stands.

        Args:
            state: of the engine.
            ledger: of the run controller.
            now: on the driver's clock, seconds.
            activities: of devices that are busy; what is not there is read off the state.
            problem: e.g. that the broker cannot be reached.
            rollout: of the shared model's versions; None: the run has no roll-out groups.
        """
        open_round = view_round(state, self._settings.round)
        traffic = ledger.traffic.values()
        end = now if ledger.ended_at is None else ledger.ended_at
        elapsed_s = 0.0 if ledger.began_at is None else end - ledger.began_at
        running = open_round.until is not None and state.running
        return Snapshot(
            name=self._settings.run.name,
            method=self._settings.method["name"],
            stage=state.stage,
            round=open_round.number,
            rounds=self._settings.run.last_round,
            attempt=open_round.attempt,
            asked=open_round.asked,
            replied=open_round.replied,
            target=open_round.target,
            waiting_for=needed(state, self._settings.round),
            round_left_s=open_round.until - now if running and open_round.until is not None else None,
            round_span_s=state.span_s if running and self._proposes else None,
            elapsed_s=elapsed_s,
            remaining_s=self._remaining_s(open_round, elapsed_s),
            curve=tuple(self._curve),
            diagnostics=self._latest_diagnostics,
            bytes_up=sum(one.up for one in traffic),
            bytes_down=sum(one.down for one in traffic),
            dense_up=4 * self._parameters * sum(one.updates for one in traffic),
            dense_down=4 * self._parameters * sum(one.tasks for one in traffic),
            refused=ledger.refusals,
            devices=tuple(self._line(view, ledger, activities or {}) for view in view_devices(state)),
            simulated=self._simulated,
            score=task_of(self._settings.task).score,
            holds=held_by(state, self._schedule, now),
            problem=problem or "",
            versions="" if rollout is None else rollout.words,
            adoption=adoption_over([self._adoption[device] for device in sorted(self._adoption)]),
        )

    @property
    def _proposes(self) -> bool:
        return self._settings.round.deadline == "predicted"

    def _remaining_s(self, open_round: RoundView, elapsed_s: float) -> float | None:
        """Rounds still to close, each as long as the latest few took; the final evaluation is one of them."""
        closed, run = self._closed_s, self._settings.run
        if len(closed) < 2 or open_round.stage == "finished" or run.last_round is None:
            return None
        usual_s = median(after - before for before, after in pairwise(closed))
        to_close = run.last_round - open_round.number + 1 + int(run.final_evaluation)
        if open_round.stage == "rehearsing":
            to_close = 1
        spent_s = min(usual_s, max(0.0, elapsed_s - closed[-1]))
        return to_close * usual_s - spent_s

    def _line(self, view: DeviceView, ledger: Ledger, activities: Mapping[DeviceId, Activity]) -> DeviceLine:
        activity = activities.get(view.device)
        doing = _doing(view, activity)
        last, traffic = self._last.get(view.device), ledger.traffic.get(view.device)
        report = view.report
        hoped_s = report.round_s if report else None
        return DeviceLine(
            device=view.device,
            doing=doing,
            board=report.board if report else "",
            ratio=report.ratio if report else None,
            fraction=activity.fraction if activity and activity.doing == doing else None,
            reason=view.refusal or view.declined_reason,
            before=BEFORE.of_reply(last) if last else None,
            after=AFTER.of_reply(last) if last else None,
            bytes_up=traffic.up if traffic else 0,
            bytes_down=traffic.down if traffic else 0,
            why=report.reason if report else "",
            actual_s=DURATION.of_reply(last) if last else None,
            predicted_s=EXPECTED.of_reply(last) if last else hoped_s,
            metrics={one.name: one.of_reply(last) for one in shown_at("live view")} if last else {},
        )


def _doing(view: DeviceView, activity: Activity | None) -> Doing:
    if view.refusal is not None:
        return "refused"
    if view.part in ("replied", "declined"):
        return "replied" if view.part == "replied" else "declined"
    if not view.ready:
        return "away"
    if view.part == "awaited":
        return activity.doing if activity else "working"
    if view.left:
        return "left"
    return "declined" if view.declined_reason else "ready"
