"""Proposed work: a task states its ratio, its share of local training and the encoding of its update.

`coordinator.rounds.proposals` decides them for each device when a round opens.
"""

from dataclasses import replace
from typing import Any, Self

from msgspec import UNSET

from fleetune.coordinator.extensions.extension import Extension, RunContext
from fleetune.coordinator.rounds.engine_state import EngineState
from fleetune.protocols.wire.payloads import Assignment


class ProposedWork(Extension):
    """Writes the proposed budget of a device into its task.

    Args:
        state: state of the round engine.
    """

    def __init__(self, state: EngineState) -> None:
        self._state = state

    @classmethod
    def of_run(cls, run: RunContext) -> Self | None:
        return cls(run.state)

    def before_send(self, assignment: Assignment[Any]) -> Assignment[Any]:
        budget = self._state.members[assignment.device].assigned
        if budget is None:
            return assignment
        return replace(
            assignment,
            ratio=budget.ratio,
            local_work=UNSET if budget.local_work == 1 else budget.local_work,
            span_s=self._state.timing.span_s or UNSET,
            uplink=budget.uplink or UNSET,
        )
