"""What a method is: how to plan a round, work on a device, and aggregate.

A method is one file in `protocols/methods/` with both halves side by side: pure steps on arrays, no
I/O, no clock, no global randomness. Engine, wire, store and simulator never ask which method runs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.bounds import Amount, FleetName, NumBytes, NumSamples, Ratio, Words
from fleetune.protocols.conditions import UNKNOWN, Conditions
from fleetune.protocols.model.loss_terms import LossTerm
from fleetune.protocols.model.spec import FlatArray, MaskArray, ModelSpec
from fleetune.protocols.randomness import Key

EVALUATION_EPOCHS = 0.36  # a forward pass over the training samples, in epochs (measured)

DeviceId = str
Rows = NDArray[np.intp]  # which training samples, shape (n,)
Part = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class Round:
    """One round as the coordinator plans it.

    Attributes:
        number: counts from 1.
        participants: the devices chosen, in ascending order.
        final_evaluation: the closing evaluation: devices do the round's work on a copy and report what it
            does to their accuracy; nothing is kept, sent or aggregated.
    """

    number: int
    participants: tuple[DeviceId, ...]
    final_evaluation: bool = False


@dataclass(frozen=True)
class DeviceReport:
    """What a device says about itself when it joins. None: it does not know.

    Attributes:
        device: its name in the fleet.
        board: the firmware profile it goes by.
        num_samples: training samples it holds.
        ratio: the ratio it chose for this run (see `Method.choices`).
        reason: why that ratio, in one line.
        samples_per_s: training speed on the fleet's model at ratio 1.
        uplink_bps, downlink_bps: its link, bits a second.
        memory_bytes: what a training process may take.
        round_s: what it expects a round at `ratio` to take, transfers included.
        conditions: how its board was when it reported.
    """

    device: FleetName
    board: Words = "generic"
    num_samples: NumSamples = 0
    ratio: Ratio = 1.0
    reason: Words = ""
    samples_per_s: Amount | None = None
    uplink_bps: Amount | None = None
    downlink_bps: Amount | None = None
    memory_bytes: NumBytes | None = None
    round_s: Amount | None = None
    conditions: Conditions = UNKNOWN


@dataclass(frozen=True)
class Cost:
    """What one round at one ratio asks of a device.

    Attributes:
        bytes_down, bytes_up: payload bytes, estimated from the entries sent.
        work: training work in each of the run's epochs, relative to full steps on every parameter.
        memory_bytes: extra memory beyond the model's own.
        extra_epochs: full epochs beside the run's: those that a method sets itself, and passes over the
            training samples for losses or gradients. The evaluations of every method are not counted.
    """

    bytes_down: int
    bytes_up: int
    work: float = 1.0
    memory_bytes: int = 0
    extra_epochs: float = 0.0

    def epochs(self, run_epochs: int) -> float:
        """The round's training work in full epochs, where the run has `run_epochs` ([training] epochs)."""
        return self.work * run_epochs + self.extra_epochs


@dataclass(frozen=True)
class Choice:
    """One ratio a method could run at, and its cost."""

    ratio: float
    cost: Cost


@dataclass(frozen=True)
class Budget:
    """What the device allows this round: the largest ratio that fits its limits."""

    ratio: float = 1.0


@dataclass(frozen=True)
class Pull:
    """A term strength * ||w - target||^2 added to the loss (gradient 2 * strength * (w - target)).

    Attributes:
        target: shape (spec.size,).
        strength: at least 0.
        mask: entries that are pulled, shape (spec.size,); None: all parameters.
    """

    target: FlatArray
    strength: float
    mask: MaskArray | None = None


@dataclass(frozen=True)
class FitPlan:
    """How to train locally, beyond the run's [training] settings.

    Attributes:
        trainable: entries that may change, shape (spec.size,); None: all parameters. Whatever the
            optimiser's momentum or weight decay, the others stay exactly as they are; running
            statistics always follow the data.
        pull: an extra term of the loss.
        loss_term: another one, which a device's backend may be unable to compute (ModelError).
        epochs: instead of the run's number of epochs.
        keep_last_gradient: also return the gradient of the last batch.
    """

    trainable: MaskArray | None = None
    pull: Pull | None = None
    loss_term: LossTerm | None = None
    epochs: int | None = None
    keep_last_gradient: bool = False


@dataclass(frozen=True)
class Fit:
    """What local training made.

    Attributes:
        weights: a new vector, shape (spec.size,).
        loss: mean training loss over the last epoch's samples, as seen while training, without pull or
            loss term.
        num_steps: optimiser steps taken.
        last_gradient: of the last batch at the weights before its step, when asked for.
    """

    weights: FlatArray
    loss: float
    num_steps: int
    last_gradient: FlatArray | None = None


class Trainer(Protocol):
    """A device's model and data, as a method sees them. It keeps no weights between calls."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def num_samples(self) -> int:
        """Training samples (validation and test not counted)."""
        ...

    @property
    def num_classes_held(self) -> int:
        """How many of the model's classes occur among the training samples."""
        ...

    def fit(self, weights: FlatArray, plan: FitPlan, key: Key) -> Fit:
        """Train from `weights`; `key` decides the order of samples and dropout.

        Raises:
            TrainingStopped: the agent wants to stop; nothing was changed.
        """
        ...

    def loss(self, weights: FlatArray, part: Part = "train") -> float:
        """Mean loss in evaluation mode. An empty part has loss 0."""
        ...

    def accuracy(self, weights: FlatArray, part: Part) -> float | None:
        """Fraction predicted correctly in evaluation mode, 0..1; None: the part is empty. A method may ask
        for the training and validation parts only: nothing is ever chosen by the test split.
        """
        ...

    def gradient(self, weights: FlatArray, rows: Rows | None = None) -> FlatArray:
        """Of the mean loss in evaluation mode, shape (spec.size,), 0 at statistics; over all training samples
        or those in `rows`.
        """
        ...

    def batches(self, key: Key) -> Iterable[Rows]:
        """The training samples as `fit` takes them, each batch's rows, epoch after epoch of the run.

        Raises:
            TrainingStopped: the agent wants to stop.
        """
        ...


S = TypeVar("S")  # coordinator state
D = TypeVar("D")  # device state
T = TypeVar("T")  # task
U = TypeVar("U")  # update


class Method(Protocol[S, D, T, U]):
    """A federated method. Implementations are frozen dataclasses whose fields are `spec` and the
    method's settings; S, D, T and U are frozen dataclasses that the codec can carry.

    Class attributes name the four types, so that bytes can be read back.
    """

    state_type: ClassVar[type]
    device_state_type: ClassVar[type]
    task_type: ClassVar[type]
    update_type: ClassVar[type]

    semi_asynchronous: ClassVar[bool] = False
    """Whether updates may be aggregated that were planned in different rounds (`round.mode`). Then a device's
    task does not depend on the other participants, planning twice on the same state with the same key gives
    the same, and `discount` is there."""

    spec: ModelSpec

    @property
    def needs_validation(self) -> bool:
        """Whether devices must hold validation samples out for it."""
        return False

    def init_coordinator(self, weights: FlatArray) -> S:
        """The state before round 1, from the initial weights."""
        ...

    def admit(self, state: S, report: DeviceReport) -> S:  # noqa: ARG002 - most methods need not know
        """Take note of a device: at the start, when it joins late, or when it comes back."""
        return state

    def init_device(self, weights: FlatArray) -> D:
        """A device's state before its first task."""
        ...

    def start_from(self, state: D, weights: FlatArray) -> D:
        """`state`, of `init_device`, for a device that comes with a personal model, shape (spec.size,), from
        the run that this one continues. What all devices have alike stays as it is.
        """
        return replace(state, weights=weights)  # type: ignore[type-var]

    def plan(self, state: S, round_: Round, key: Key) -> tuple[S, Mapping[DeviceId, T]]:
        """A task for each participant. The mapping may be lazy (see `lazily`)."""
        ...

    def work(self, state: D, task: T, trainer: Trainer, budget: Budget, key: Key) -> tuple[D, U]:
        """Do a task: the device's next state and its update."""
        ...

    def aggregate(self, state: S, updates: Iterable[tuple[DeviceId, U]]) -> S:
        """Take a round's updates in: any non-empty subset, in ascending order of devices, one by one."""
        ...

    def discount(self, state: S, update: U, factor: float) -> U:
        """A stale update at `factor` in (0, 1) of its weight, the rest of which goes to `state`."""
        raise NotImplementedError(f"{type(self).__name__} is not semi-asynchronous")

    def personal_model(self, state: D) -> FlatArray:
        """The model this device would use, shape (spec.size,)."""
        ...

    def shared_model(self, state: S) -> FlatArray:
        """The coordinator's model, shape (spec.size,)."""
        ...

    def choices(self, report: DeviceReport) -> Sequence[Choice]:
        """The ratios a device could run at, ascending, each with its cost; at least one."""
        ...

    def finished(self, state: D) -> bool:  # noqa: ARG002
        """Whether this device has nothing more to gain and leaves the run (early stopping)."""
        return False


@dataclass(frozen=True)
class lazily(Mapping[DeviceId, T]):  # noqa: N801 - reads as the word it is: lazily(participants, make)
    """Tasks made when they are asked for, so that a round never holds all its payloads."""

    participants: tuple[DeviceId, ...]
    make: Callable[[DeviceId], T] = field(repr=False)

    def __getitem__(self, device: DeviceId) -> T:
        if device not in self.participants:
            raise KeyError(device)
        return self.make(device)

    def __iter__(self) -> Iterator[DeviceId]:
        return iter(self.participants)

    def __len__(self) -> int:
        return len(self.participants)
