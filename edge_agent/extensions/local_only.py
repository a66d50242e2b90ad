"""Trains the local-only baseline: the model that this device would have without a fleet.

Training starts from the run's initial model, or from the device's own model if it has one. In each round that
the device takes part in, the baseline gets one round's epochs of plain local training. The method local-only
trains in the same way. The model never leaves the device.

The model that adoption compares with must not be trained on the held-out samples. A device without a fleet
would train on all of its samples. So a second model may be trained on all samples, and is deployed instead.
It equals, bit for bit, the result of the method local-only in a run that holds nothing out.
"""

import logging
from dataclasses import dataclass, replace
from typing import Self

from msgspec import UNSET, UnsetType

from fleetune.edge_agent.extensions.extension import (
    Extension,
    RoundAttempt,
    RunStart,
    TrainingResult,
    TrainingRound,
)
from fleetune.edge_agent.training.local_training import LocalTrainer
from fleetune.edge_agent.training.optimisers.optimiser_states import RoundOptimiserStates, States
from fleetune.protocols.errors import TrainingDiverged
from fleetune.protocols.method.trainer import FitPlan
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.adoption import AdoptionSection

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LocalOnlyModel:
    """A model trained on this device's samples only.

    Attributes:
        weights: shape (spec.size,), trained without the held-out samples.
        on_all: shape (spec.size,), trained on all samples; None if the run does not ask for it.
        rounds: rounds in which the device has worked since it started, with or without this training.
        round, attempt: round and attempt of the last training; 0 before the first.
        final_evaluation: True if the last training was in a final evaluation.
        optimiser: optimiser states of the two trainings, if the run keeps them.
    """

    weights: FlatArray
    on_all: FlatArray | None = None
    rounds: int = 0
    round: int = 0
    attempt: int = 0
    final_evaluation: bool = False
    optimiser: States | UnsetType = UNSET

    @property
    def to_deploy(self) -> FlatArray:
        """The weights that the device deploys, shape (spec.size,)."""
        return self.weights if self.on_all is None else self.on_all


class LocalOnly(Extension[LocalOnlyModel]):
    """Trains the local-only model every `compare_alone` rounds.

    Args:
        section: the run's [adoption].
        initial: the run's initial weights, shape (spec.size,).
        keeps_optimiser: True if the optimiser's state is kept between rounds.
    """

    name = "local_only"
    state_type = LocalOnlyModel

    def __init__(self, section: AdoptionSection, initial: FlatArray, *, keeps_optimiser: bool) -> None:
        self._section, self._initial, self._keeps_optimiser = section, initial, keeps_optimiser

    @classmethod
    def for_run(cls, start: RunStart) -> Self | None:
        section, enrolment = start.enrolment.adoption, start.enrolment
        if start.files is None or section is UNSET or not section.enabled or not section.compare_alone:
            return None
        keeps_optimiser = enrolment.training.optimiser_state != "round"
        return cls(section, enrolment.weights, keeps_optimiser=keeps_optimiser)

    def first_state(self, weights: FlatArray) -> LocalOnlyModel:
        return LocalOnlyModel(weights, weights if self._section.alone_on_all else None)

    def after_training(
        self,
        round_: TrainingRound,
        result: TrainingResult,  # noqa: ARG002 - it never sees the fleet's model
        state: LocalOnlyModel | None,
    ) -> LocalOnlyModel:
        model = state or self.first_state(self._initial)
        memory = None
        if self._keeps_optimiser:
            memory = RoundOptimiserStates(() if model.optimiser is UNSET else model.optimiser)
        trainer = round_.trainer.in_round(round_.attempt.round, memory)
        return trained(model, round_.attempt, self._section.compare_alone, trainer, round_.key, memory)


def trained(
    model: LocalOnlyModel,
    attempt: RoundAttempt,
    every: int,
    trainer: LocalTrainer,
    key: Key,
    memory: RoundOptimiserStates | None = None,
) -> LocalOnlyModel:
    """Return the model after a round; it is trained in the first round and every `every`-th round from there.

    The model is also trained in a final evaluation, like the fleet's models. If training diverges, the model
    stays unchanged and the device still takes part in the run. `trainer` writes the optimiser's state into
    `memory`.

    Raises:
        TrainingStopped: the agent stops.
    """
    worked = replace(model, rounds=model.rounds + 1)
    if not attempt.final_evaluation and model.rounds % every:
        return worked
    try:
        fit = trainer.fit(model.weights, FitPlan(), key)
        more = None if model.on_all is None else trainer.on_all().fit(model.on_all, FitPlan(), key)
    except TrainingDiverged as problem:
        log.warning("the local-only model stays unchanged: %s", problem)
        return worked
    return replace(
        worked,
        weights=fit.weights,
        on_all=None if more is None else more.weights,
        round=attempt.round,
        attempt=attempt.attempt,
        final_evaluation=attempt.final_evaluation,
        optimiser=UNSET if memory is None else memory.after,
    )
