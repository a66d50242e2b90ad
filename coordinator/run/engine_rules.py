"""The round engine of a run, made from its settings."""

from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from fleetune.coordinator.rounds.engine import RoundEngine
from fleetune.coordinator.rounds.engine_state import EngineState
from fleetune.coordinator.rounds.policies.task_limit import TaskLimit
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
    run, limit = settings.run, TaskLimit()
    if settings.privacy is not None:
        most = None if enrolment.most_tasks is UNSET else enrolment.most_tasks
        limit = TaskLimit(most, f"a further round would exceed privacy.max_epsilon = {_limit(settings)}")
        if not settings.privacy.scores:  # its only result is scores, which devices do not send
            run = replace(run, final_evaluation=False)
    return RoundEngine(run, settings.round, state, schedule_of(settings.schedule), planner, limit)


def _limit(settings: RunSettings) -> str:
    limit = None if settings.privacy is None else settings.privacy.max_epsilon
    return "not set" if limit is None else f"{limit:g}"
