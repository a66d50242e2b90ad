"""The round engine of a run, made from its settings."""

from typing import Any

from fleetune.coordinator.rounds.engine import RoundEngine
from fleetune.coordinator.rounds.engine_state import EngineState
from fleetune.coordinator.rounds.proposals.planner import Planner
from fleetune.coordinator.run.run_clock import schedule_of
from fleetune.protocols.method.method import Method
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.wire.payloads import Enrolment


def engine_of(
    settings: RunSettings,
    enrolment: Enrolment,
    method: Method[Any, Any, Any, Any],
    state: EngineState | None = None,
) -> RoundEngine:
    """Return a round engine in this state; None for the state of a new run."""
    planner = Planner(settings.objective, tuple(one.cost for one in enrolment.uplinks), method.utility)
    return RoundEngine(settings.run, settings.round, state, schedule_of(settings.schedule), planner)
