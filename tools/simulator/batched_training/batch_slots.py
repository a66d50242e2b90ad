"""The backend of one device in a batch: its requests are carried out together with those of the other
devices.
"""

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fleetune.edge_agent.training.backend import (
    ExtraLoss,
    InputArray,
    LabelArray,
    SmallerNetwork,
    UpperLayers,
)
from fleetune.edge_agent.training.gpu.gpu_descent import GpuDescent
from fleetune.edge_agent.training.optimisers.optimiser import OptimiserState
from fleetune.edge_agent.training.torch_backend import TorchBackend
from fleetune.protocols.errors import ModelError
from fleetune.protocols.method.trainer import FitPlan
from fleetune.protocols.model.loss_terms import Answer
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.device import TrainingSection
from fleetune.protocols.tasks.task import Task
from fleetune.tools.simulator.batched_training.barrier import Barrier
from fleetune.tools.simulator.batched_training.stacked_networks import (
    Descend,
    Evaluation,
    Request,
    SingleCall,
    StackedNetworks,
    Step,
)

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")


class BatchSlots:
    """Slots for devices that train at the same time in this process.

    Args:
        backend: a backend of one network of the same architecture.
        most: number of slots.

    Raises:
        ModelError: several networks of this model cannot be trained as one.
    """

    def __init__(self, backend: TorchBackend, most: int) -> None:
        self._networks = StackedNetworks(backend, most)
        self._barrier: Barrier[Request, Any] = Barrier(self._networks.carry_out)
        self.backends = [BatchSlot(backend, number, self._networks, self._barrier) for number in range(most)]

    def each(self, do: Callable[[int, _Job], _Result], jobs: list[_Job]) -> list[_Result | Exception]:
        """Execute each job in its own slot, at most one job a slot; return the result or the exception of
        each.

        Args:
            do: called with the number of the slot and the job.
            jobs: jobs in the order of slots.
        """

        def in_slot(slot: int, job: _Job) -> _Result | Exception:
            with self._barrier.slot(slot):
                try:
                    return do(slot, job)
                except Exception as fault:  # noqa: BLE001 - of this job alone
                    return fault

        self._barrier.begin(range(len(jobs)))
        with ThreadPoolExecutor(len(jobs)) as threads:
            try:
                return list(threads.map(in_slot, range(len(jobs)), jobs))
            except BaseException:  # Ctrl-C
                self._barrier.cancel()
                raise


@dataclass(frozen=True)
class BatchSlot:
    """A `Backend` whose vectors are one row of the stacked vectors."""

    backend: TorchBackend
    number: int
    networks: StackedNetworks
    barrier: Barrier[Request, Any]

    @property
    def spec(self) -> ModelSpec:
        return self.backend.spec

    @property
    def task(self) -> Task:
        return self.backend.task

    @property
    def vocabulary(self) -> int | None:
        """See `Backend.vocabulary`."""
        return self.backend.vocabulary

    @property
    def weights(self) -> FlatArray:
        return self.networks.vectors.weights_of(self.number)

    @property
    def gradient(self) -> FlatArray:
        return self.networks.vectors.gradient_of(self.number)

    def upper_layers(self) -> UpperLayers | None:
        """None, because frozen parts are computed with the rest."""
        return None

    def smaller_network(self, counts: tuple[int, ...]) -> SmallerNetwork | None:  # noqa: ARG002 - the protocol's
        """None, because networks of other shapes cannot be stacked."""
        return None

    def gpu_descent(
        self, settings: TrainingSection, plan: FitPlan, before: OptimiserState | None
    ) -> "SlotDescent | None":
        """See `Backend.gpu_descent`. On a GPU all slots step together."""
        vectors = self.networks.vectors
        if not vectors.on_gpu:
            return None
        return SlotDescent(
            GpuDescent(vectors, self.number, self.spec.num_parameters, settings, plan, before), self
        )

    def load(self, weights: FlatArray) -> None:
        """Copy `weights`, shape (spec.size,), into `self.weights`."""
        if weights.shape != (self.spec.size,):
            raise ModelError(f"{weights.shape} weights for model {self.spec.name} of {self.spec.size}")
        self.networks.vectors.load(weights, self.number)

    def step(
        self,
        x: InputArray,
        y: LabelArray,
        key: Key,
        *,
        training: bool = True,
        extra_loss: ExtraLoss | None = None,
        tensors: Collection[str] | None = None,
    ) -> float:
        """Forward and backward over one batch, see `Backend.step`."""
        wanted = None if tensors is None else frozenset(tensors)
        mean: float = self.barrier.request(self.number, Step(x, y, key, training, extra_loss, wanted))
        return mean

    def answer(self, x: InputArray, what: Answer) -> NDArray[np.float32]:
        """See `Backend.answer`."""
        found: NDArray[np.float32] = self.barrier.request(
            self.number, SingleCall(lambda backend: backend.answer(x, what))
        )
        return found

    def evaluate(self, x: InputArray, y: LabelArray) -> tuple[float, NDArray[np.float32]]:
        """Sum of losses and outputs, see `Backend.evaluate`."""
        found: tuple[float, NDArray[np.float32]] = self.barrier.request(self.number, Evaluation(x, y))
        return found

    def losses(self, x: InputArray, y: LabelArray) -> NDArray[np.float64]:
        """Each sample's loss, see `Backend.losses`."""
        found: NDArray[np.float64] = self.barrier.request(
            self.number, SingleCall(lambda backend: backend.losses(x, y))
        )
        return found


@dataclass(frozen=True)
class SlotDescent:
    """The optimiser of one slot, see `GpuDescent`."""

    descent: GpuDescent
    slot: BatchSlot

    def step(self, *, move_lower: bool = True) -> float | None:
        """See `Descent.step`."""
        norm: float | None = self.slot.barrier.request(self.slot.number, Descend(self.descent, move_lower))
        return norm

    def state(self) -> OptimiserState:
        """See `Descent.state`."""
        return self.descent.state()
