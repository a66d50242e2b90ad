"""The base class of extensions: features that take part in a device's rounds through a few hooks.

A session calls the hooks of all extensions in the order of `order.py`. An extension keeps values between
rounds in its state. That state lies in the extension's slot of the session's state, and both are stored in
one write. A final evaluation works on a copy, and its new states are discarded.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Self, TypeVar

from msgspec import UNSET, UnsetType

from fleetune.edge_agent.state.deployed_files import DeployedFiles
from fleetune.edge_agent.training.local_training import LocalTrainer
from fleetune.edge_agent.training.optimisers.optimiser_states import RoundOptimiserStates
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.randomness import Key
from fleetune.protocols.wire.payloads import Enrolment, Measures
from fleetune.protocols.wire.release import Release

S = TypeVar("S")
U = TypeVar("U")
Slots = Mapping[str, Any]
"""The states of a session, by the name of the extension or feature that owns each."""


@dataclass(frozen=True)
class RoundAttempt:
    """Number of a round, number of the attempt at it, and True for the run's final evaluation."""

    round: int
    attempt: int
    final_evaluation: bool = False


@dataclass(frozen=True)
class RunStart:
    """The values from which extensions are made when a device joins a run.

    Attributes:
        enrolment: enrolment of the run.
        trainer: the device's model and data.
        files: files of the deployed model and its versions; None if no model is deployed.
        num_validation: number of the device's validation samples, which are in order of arrival.
        samples: fingerprint of the validation and test samples.
        session_keeps_newest: True in a simulation, whose sessions hold the newest model without a file.
        simulated: True in a simulation, whose results must be repeatable; noise then comes from keys.
    """

    enrolment: Enrolment
    trainer: LocalTrainer
    files: DeployedFiles | None = None
    num_validation: int = 0
    samples: str = ""
    session_keeps_newest: bool = False
    simulated: bool = False

    @classmethod
    def of(
        cls,
        enrolment: Enrolment,
        trainer: LocalTrainer,
        files: DeployedFiles,
        *,
        session_keeps_newest: bool = False,
        simulated: bool = False,
    ) -> Self:
        """Return the values from a trainer that has its data."""
        num_validation, samples = trainer.data.compared.size, trainer.data.fingerprint
        return cls(enrolment, trainer, files, num_validation, samples, session_keeps_newest, simulated)


@dataclass
class TrainingRound:
    """One round on this device, as it is passed to the hooks.

    Attributes:
        attempt: round, attempt, and True for the final evaluation.
        trainer: the device's model and data, without the settings of the round.
        key: key of this device's random draws in this attempt.
        slots: the states by name. After training, earlier extensions have already written their new states.
        release: versions of the shared model that the device may deploy; UNSET if the task names none.
        optimiser_memory: the optimiser's state before and after the round; None if each round starts afresh.
        measures: fields of `Measures` that extensions add to the reply.
    """

    attempt: RoundAttempt
    trainer: LocalTrainer
    key: Key
    slots: dict[str, Any]
    release: Release | UnsetType = UNSET
    optimiser_memory: RoundOptimiserStates | None = None
    measures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainingResult:
    """The result of the method's local training in a round.

    Attributes:
        personal: the personal model, shape (spec.size,).
        score: its score on the device's test split; None without a test split.
        training_loss: mean loss of the last epoch during training; None if nothing was trained.
        start: in a final evaluation, the model that training started from; None if nothing was trained.
        start_score: score of `start` on the test split.
    """

    personal: FlatArray
    score: float | None = None
    training_loss: float | None = None
    start: FlatArray | None = None
    start_score: float | None = None


class Extension(Generic[S]):
    """A feature of a device's rounds. Each hook does nothing unless overridden.

    Class attributes:
        name: name of its slot.
        state_type: type of its state, which the codec must be able to encode.
    """

    name: ClassVar[str]
    state_type: ClassVar[Any]

    @classmethod
    def for_run(cls, start: RunStart) -> Self | None:
        """Make the extension for a run; None if the run does not use it.

        Raises:
            PacketError: a file that it reads is damaged.
            StoreError: a file cannot be read or written.
        """
        raise NotImplementedError

    def first_state(self, weights: FlatArray) -> S | None:
        """Return the state before the first round, from the device's initial weights; None for no state."""

    def before_training(self, round_: TrainingRound, state: S | None) -> None:
        """Prepare a round."""

    def after_training(
        self,
        round_: TrainingRound,  # noqa: ARG002 - for those that override it
        result: TrainingResult,  # noqa: ARG002
        state: S | None,
    ) -> S | None:
        """Return the state after a round's training; None if no state is kept.

        Raises:
            StoreError: a file cannot be read or written.
        """
        return state

    def outgoing(self, round_: TrainingRound, task: Any, update: U) -> U:  # noqa: ARG002
        """Return the update as it leaves the device; not called in a final evaluation.

        Raises:
            PacketError: the update cannot be sent as the run asks.
        """
        return update

    def reported(self, measures: Measures) -> Measures:
        """Return the scores and losses as they leave the device."""
        return measures


@dataclass(frozen=True)
class ExtensionChain:
    """The extensions of a run, in their order."""

    extensions: tuple[Extension[Any], ...] = ()

    def first_slots(self, weights: FlatArray) -> dict[str, Any]:
        """Return the states before the first round of a device that starts with these weights."""
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

    def outgoing(self, round_: TrainingRound, task: Any, update: U) -> U:
        """Return the update after `Extension.outgoing` of every extension."""
        for one in self.extensions:
            update = one.outgoing(round_, task, update)
        return update

    def reported(self, measures: Measures) -> Measures:
        """Return the measures after `Extension.reported` of every extension."""
        for one in self.extensions:
            measures = one.reported(measures)
        return measures
