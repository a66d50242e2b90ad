"""The local part of one round: the method's work, the extensions, and the scores of the resulting models."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from msgspec import UNSET, UnsetType

from fleetune.edge_agent.extensions.extension import (
    ExtensionChain,
    RoundAttempt,
    TrainingResult,
    TrainingRound,
)
from fleetune.edge_agent.extensions.session_state import State
from fleetune.edge_agent.run.observed_trainer import ObservedTrainer
from fleetune.edge_agent.training.local_training import LocalTrainer
from fleetune.protocols.bounds import LARGEST_LOSS
from fleetune.protocols.errors import TrainingDiverged
from fleetune.protocols.finite import not_finite
from fleetune.protocols.method import steps
from fleetune.protocols.method.choice import Budget
from fleetune.protocols.method.method import Method
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.wire.payloads import Assignment, Enrolment, Measures, work_key


@dataclass(frozen=True)
class RoundResult:
    """The result of a round's work; see `SessionState` and `Reply`.

    Attributes:
        state: the method's new state.
        update: the method's update.
        measures: scores of the models.
        slots: the new states of the extensions.
        local_work: share of the run's local training that was done.
    """

    state: Any
    update: Any
    measures: Measures
    slots: Mapping[str, Any]
    local_work: float


class LocalRound:
    """Works on tasks with this device's samples.

    Args:
        enrolment: enrolment of the run.
        device: name of the device.
        method: made from the enrolment.
        trainer: the device's model and data.
        extensions: extensions of the run.
    """

    def __init__(
        self,
        enrolment: Enrolment,
        device: str,
        method: Method[Any, Any, Any, Any],
        trainer: LocalTrainer,
        extensions: ExtensionChain,
    ) -> None:
        self._enrolment, self._device, self._method = enrolment, device, method
        self.trainer, self._extensions = trainer, extensions

    def work(
        self,
        assignment: Assignment[Any],
        budget: Budget,
        before: State,
        enough: Callable[[], bool] = lambda: False,
    ) -> RoundResult:
        """Do a task; `before` is left unchanged.

        Args:
            assignment: the task.
            budget: limits of the device.
            before: the session's state before the round.
            enough: local training ends early once this returns True.

        Raises:
            TrainingStopped: the agent stops.
            TrainingDiverged: training diverged, or the method's numbers are not finite.
            MethodError: the method's `work` failed.
            StoreError: an extension cannot read or write its files.
            PacketError: the update cannot be sent as [privacy] asks.
        """
        attempt = RoundAttempt(assignment.round, assignment.attempt, assignment.final_evaluation)
        key = work_key(self._enrolment.seed, attempt.round, attempt.attempt, self._device)
        round_ = TrainingRound(attempt, self.trainer, key, dict(before.slots), assignment.release)
        self._extensions.before_training(round_)
        trainer = self.trainer.in_round(
            attempt.round, round_.optimiser_memory, local_work=budget.local_work, enough=enough
        )
        observed = ObservedTrainer(trainer, keep_start=attempt.final_evaluation)
        # non-finite values are detected and named below
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            state, update = steps.work(self._method, before.state, assignment.task, observed, budget, key)
        self._check_finite(state, update, observed.train_loss)
        personal = self._method.personal_model(state)
        score, scores = self._scores(personal)
        result = TrainingResult(personal, score, observed.train_loss, observed.start, observed.before)
        self._extensions.after_training(round_, result)
        local_work = budget.local_work if observed.local_work is None else observed.local_work
        measures = Measures(
            num_samples=self.trainer.num_samples,
            num_test=self.trainer.num_test,
            train_loss=observed.train_loss,
            before=observed.before,
            after=score,
            scores=scores,
            local_work=UNSET if local_work == 1 else local_work,
            **round_.measures,
        )
        if attempt.final_evaluation:
            measures = self._with_final_scores(measures, self._method.personal_model(before.state))
        else:
            update = self._extensions.outgoing(round_, assignment.task, update)
        measures = self._extensions.reported(measures)
        return RoundResult(state, update, measures, round_.slots, local_work)

    def _with_final_scores(self, measures: Measures, personal: FlatArray) -> Measures:
        """Add the scores of the personal model from before the final evaluation."""
        score, scores = self._scores(personal)
        measures = replace(measures, personal=score, scores=scores)
        if self._enrolment.asks_validation is not True:
            return measures
        return replace(measures, validation=self.trainer.score(personal, "validation"))

    def _scores(self, weights: FlatArray) -> tuple[float | None, dict[str, float] | UnsetType]:
        """Return a model's score on the test split, and all scores if the run has a [task]."""
        if self._enrolment.task is UNSET:
            return self.trainer.score(weights), UNSET
        scores = self.trainer.scores(weights)
        return scores.get(self.trainer.task.score.name), scores

    def _check_finite(self, state: Any, update: Any, loss: float | None) -> None:
        found = not_finite(update, "update") or not_finite(state, "state")
        if found:
            name = self._enrolment.method["name"]
            raise TrainingDiverged(
                f"method {name}: {found} is not finite after local training: lower training.learning_rate"
            )
        if loss is not None and not loss <= LARGEST_LOSS:
            raise TrainingDiverged(f"training diverged (loss is {loss:g}): lower training.learning_rate")
