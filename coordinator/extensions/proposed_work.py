"""Proposed work: a task says at which ratio, with how much local training and with which encoding it is to be
done.

What is proposed to each device is decided in `coordinator.rounds.proposals` when a round opens.
"""

from dataclasses import replace
from typing import Any, Self

from msgspec import UNSET

from fleetune.coordinator.extensions.extension import Extension, RunContext
from fleetune.coordinator.rounds.engine_state import EngineState
from fleetune.protocols.wire.payloads import Assignment


class ProposedWork(Extension):
    """Writes what was proposed to a device into its task.

    Args:
        state: of the round engine.
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
