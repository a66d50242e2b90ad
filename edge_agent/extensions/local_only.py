"""The model that a device would have by local training alone: kept beside the run's, with the same training.

It starts where the run starts (with the device's own model, where it has one) and is trained as local-only
trains: a round's epochs of plain local training, in the rounds that the device takes part in. It never leaves
the device.

The one that others are judged by must not have seen the held-out samples. What the device would have
without a fleet has seen all of them: so a second one may be trained on all, which is served in its place. It
is to the last bit what the method local-only leads to in the same rounds of a run that holds nothing out.
"""

import logging
from dataclasses import dataclass, replace
from typing import Protocol

from msgspec import UNSET, UnsetType

from fleetune.edge_agent.training.optimisers.optimiser_memory import OptimiserMemory, States
from fleetune.protocols.errors import TrainingDiverged
from fleetune.protocols.method.trainer import FitPlan, Trainer
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.randomness import Key

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RoundAttempt:
    """A round's number and attempt, and whether it is the run's final evaluation."""

    round: int
    attempt: int
    closing: bool = False


@dataclass(frozen=True)
class LocalOnlyModel:
    """A model trained alone.

    Attributes:
        weights: shape (spec.size,), trained without the held-out samples.
        on_all: likewise, trained on all; None: the run asks for none.
        rounds: that the device has worked in since it began, whether the model was trained in them or not.
        round, attempt: in which it was last trained; 0: not yet.
        closing: in a final evaluation.
        optimiser: what the optimiser remembers of the two trainings, where the run has that kept.
    """

    weights: FlatArray
    on_all: FlatArray | None = None
    rounds: int = 0
    round: int = 0
    attempt: int = 0
    closing: bool = False
    optimiser: States | UnsetType = UNSET

    @property
    def to_serve(self) -> FlatArray:
        """The one that the device serves, shape (spec.size,)."""
        return self.weights if self.on_all is None else self.on_all


class LocalOnlyTrainer(Trainer, Protocol):
    """A device's model and data."""

    def on_all(self) -> Trainer:
        """The same with the validation samples among the training samples."""
        ...


def train_local_only(
    alone: LocalOnlyModel,
    turn: RoundAttempt,
    every: int,
    trainer: LocalOnlyTrainer,
    key: Key,
    states: OptimiserMemory | None = None,
) -> LocalOnlyModel:
    """The model after a round's work: trained in the first round, and in every `every`-th from there.

    In a final evaluation it is trained too, as the fleet's models are; the caller throws that state away. If
    it diverges it stays as it was: that is no reason not to take part. `states` is where
    `trainer` leaves what its optimiser remembers.

    Raises:
        TrainingStopped: the agent stops.
    """
    due = turn.closing or alone.rounds % every == 0
    worked = replace(alone, rounds=alone.rounds + 1)
    if not due:
        return worked
    try:
        fit = trainer.fit(alone.weights, FitPlan(), key)
        more = None if alone.on_all is None else trainer.on_all().fit(alone.on_all, FitPlan(), key)
    except TrainingDiverged as problem:
        log.warning("the model trained alone stays as it was: %s", problem)
        return worked
    return replace(
        worked,
        weights=fit.weights,
        on_all=None if more is None else more.weights,
        round=turn.round,
        attempt=turn.attempt,
        closing=turn.closing,
        optimiser=UNSET if states is None else states.after,
    )
