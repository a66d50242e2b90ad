"""The round engine of a run, made from its settings."""

from typing import Any

from fleetune.coordinator.rounds.actions import Action
from fleetune.coordinator.rounds.engine import RoundEngine
from fleetune.coordinator.rounds.engine_state import EngineState
from fleetune.coordinator.rounds.proposals.planner import Planner
from fleetune.coordinator.rounds.window_engine import engine_type
from fleetune.coordinator.run.run_clock import schedule_of
from fleetune.protocols.method.method import Method
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.wire.payloads import Enrolment


class EngineRules:
    """The rules of one run's rounds, and a factory of engines that follow them.

    Args:
        settings: settings of the run.
        enrolment: initial data of its devices.
        method: method of the run.

    Attributes:
        schedule: times at which rounds may open.
    """

    def __init__(
        self, settings: RunSettings, enrolment: Enrolment, method: Method[Any, Any, Any, Any]
    ) -> None:
        self.schedule = schedule_of(settings.schedule)
        self._run, self._round = settings.run, settings.round
        self._type = engine_type(settings.round)
        uplinks = tuple(one.cost for one in enrolment.uplinks)
        self._planner = Planner(settings.objective, uplinks, method.utility)

    def engine(self, state: EngineState | None = None) -> RoundEngine:
        """A round engine in this state; None for the state of a new run."""
        return self._type(self._run, self._round, state, self.schedule, self._planner)

    def resume(self, stored: EngineState, now: float) -> tuple[RoundEngine, list[Action]]:
        """A round engine that continues from a stored state after a restart, and its first actions."""
        return self._type.resume(self._run, self._round, stored, now, self.schedule, self._planner)
