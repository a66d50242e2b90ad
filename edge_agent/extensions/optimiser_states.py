"""Keeps the optimiser's state between rounds, in runs with `training.optimiser_state = "device"`."""

from typing import Self

from fleetune.edge_agent.extensions.extension import Extension, RunStart, TrainingResult, TrainingRound
from fleetune.edge_agent.training.optimisers.optimiser_states import RoundOptimiserStates, States


class OptimiserStates(Extension[States]):
    """Extension whose state is one optimiser state for each local training of a round."""

    name = "optimiser"
    state_type = States

    @classmethod
    def for_run(cls, start: RunStart) -> Self | None:
        return None if start.enrolment.training.optimiser_state == "round" else cls()

    def before_training(self, round_: TrainingRound, state: States | None) -> None:
        round_.optimiser_memory = RoundOptimiserStates(state or ())

    def after_training(
        self,
        round_: TrainingRound,
        result: TrainingResult,  # noqa: ARG002
        state: States | None,  # noqa: ARG002
    ) -> States | None:
        assert round_.optimiser_memory is not None, "set before training"
        return round_.optimiser_memory.after
