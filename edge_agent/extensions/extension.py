"""The base of extensions: features that take part in a device's rounds through a few hooks.

A session calls the hooks of all extensions in the order of `order.py`. What an extension has to keep between
rounds is its state. It lies in the extension's slot of the session's state and is stored with it, in one
write.
A final evaluation works on a copy: the states that it leads to are thrown away.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from msgspec import UNSET, UnsetType

from fleetune.edge_agent.state.deployed_files import DeployedFiles
from fleetune.edge_agent.training.local_training import LocalTrainer
from fleetune.edge_agent.training.optimisers.optimiser_states import RoundOptimiserStates
from fleetune.protocols.method.trainer import Part, Trainer
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.randomness import Key
from fleetune.protocols.tasks.anomaly_threshold import Threshold
from fleetune.protocols.tasks.score_gain import Gain
from fleetune.protocols.tasks.task import Task
from fleetune.protocols.wire.payloads import Enrolment
from fleetune.protocols.wire.release import Release

S = TypeVar("S")
Slots = Mapping[str, Any]
"""The states of a session by the name of what keeps them."""


class EvaluatingTrainer(Trainer, Protocol):
    """A device's model and data: it trains, and evaluates models on the device's own samples."""

    def in_round(
        self,
        number: int,
        optimiser_states: RoundOptimiserStates | None,
        *,
        local_work: float = 1.0,
        enough: Callable[[], bool] = lambda: False,
    ) -> "EvaluatingTrainer":
        """The trainer for a round; it leaves in `optimiser_states` what the optimiser is to remember."""
        ...

    def on_all(self) -> Trainer:
        """The same trainer with the validation samples among the training samples."""
        ...

    @property
    def num_test(self) -> int: ...

    @property
    def task(self) -> Task: ...

    def score(self, weights: FlatArray, part: Part = "test") -> float | None:
        """The task's score; None: the part is empty or cannot tell."""
        ...

    def scores(self, weights: FlatArray, part: Part = "test") -> dict[str, float]:
        """All scores of the task by name."""
        ...

    def threshold(self, weights: FlatArray) -> Threshold | None: ...

    def gain(self, weights: FlatArray, others: FlatArray, part: Part) -> Gain | None: ...


@dataclass(frozen=True)
class RoundAttempt:
    """The number of a round and of the attempt at it, and whether it is the run's final evaluation."""

    round: int
    attempt: int
    final_evaluation: bool = False


@dataclass(frozen=True)
class RunStart:
    """What extensions are made from when a device takes up a run.

    Attributes:
        enrolment: of the run.
        trainer: the device's model and data.
        files: of the deployed model and its versions; None: no model is deployed.
        num_validation: validation samples of the device, in the order in which they came.
        samples: fingerprint of the validation and test samples.
        session_keeps_newest: a simulation's sessions keep the newest model anyway, so no file need hold it.
    """

    enrolment: Enrolment
    trainer: EvaluatingTrainer
    files: DeployedFiles | None = None
    num_validation: int = 0
    samples: str = ""
    session_keeps_newest: bool = False

    @classmethod
    def of(
        cls,
        enrolment: Enrolment,
        trainer: LocalTrainer,
        files: DeployedFiles,
        *,
        session_keeps_newest: bool = False,
    ) -> Self:
        """Of a trainer with its data."""
        num_validation, samples = trainer.data.compared.size, trainer.data.fingerprint
        return cls(enrolment, trainer, files, num_validation, samples, session_keeps_newest)


@dataclass
class TrainingRound:
    """One round on this device, as the hooks see it.

    Attributes:
        attempt: round, attempt, and whether it is the final evaluation.
        trainer: the device's model and data, without the settings of the round.
        key: of this device's draws in this attempt.
        slots: the states by name. After training, those of earlier extensions are already the new ones.
        release: the shared model's versions that the device may deploy; UNSET: the task names none.
        optimiser_memory: what the optimiser starts with and ends with; None: each round starts afresh.
        measures: fields of `Measures` that extensions add to the reply.
    """

    attempt: RoundAttempt
    trainer: EvaluatingTrainer
    key: Key
    slots: dict[str, Any]
    release: Release | UnsetType = UNSET
    optimiser_memory: RoundOptimiserStates | None = None
    measures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainingResult:
    """What the method's work led to.

    Attributes:
        personal: the personal model, shape (spec.size,).
        score: of it on the device's test split; None: without one.
        training_loss: mean loss of the last epoch, as seen while training; None: nothing was trained.
        start: in a final evaluation, the model that training started from; None: nothing was trained.
        start_score: of that model on the test split.
    """

    personal: FlatArray
    score: float | None = None
    training_loss: float | None = None
    start: FlatArray | None = None
    start_score: float | None = None


class Extension(Generic[S]):
    """A feature of a device's rounds. Each hook does nothing unless overridden.

    Class attributes:
        name: of its slot.
        state_type: of its state, which the codec can carry.
    """

    name: ClassVar[str]
    state_type: ClassVar[Any]

    @classmethod
    def for_run(cls, start: RunStart) -> Self | None:
        """The extension in a run; None: the run does not use it.

        Raises:
            PacketError: a file that it reads is damaged.
            StoreError: a file cannot be read or written.
        """
        raise NotImplementedError

    def first_state(self, weights: FlatArray) -> S | None:
        """The state before the first round, from the model that the device starts with; None: none yet."""

    def before_training(self, round_: TrainingRound, state: S | None) -> None:
        """Prepare a round."""

    def after_training(
        self,
        round_: TrainingRound,  # noqa: ARG002 - for those that override it
        result: TrainingResult,  # noqa: ARG002
        state: S | None,
    ) -> S | None:
        """The state after a round's training; None: none is kept.

        Raises:
            StoreError: a file cannot be read or written.
        """
        return state


@dataclass(frozen=True)
class ExtensionChain:
    """The extensions of a run, in their order."""

    extensions: tuple[Extension[Any], ...] = ()

    def first_slots(self, weights: FlatArray) -> dict[str, Any]:
        """The states before the first round, of a device that starts with these weights."""
        states = ((one.name, one.first_state(weights)) for one in self.extensions)
        return {name: state for name, state in states if state is not None}

    def before_training(self, round_: TrainingRound) -> None:
        """Let every extension prepare the round."""
        for one in self.extensions:
            one.before_training(round_, round_.slots.get(one.name))

    def after_training(self, round_: TrainingRound, result: TrainingResult) -> None:
        """Replace the states in `round_.slots` by those after the round."""
        for one in self.extensions:
            state = one.after_training(round_, result, round_.slots.pop(one.name, None))
            if state is not None:
                round_.slots[one.name] = state
