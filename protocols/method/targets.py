"""The family of personal targets: each device trains its own model, pulled towards a target made for it.

In these methods (FedAMP, ClusterFL) no device trains on a shared model. One round:

1. The coordinator makes a target for each participant from the latest model of every device.
2. The device trains its own model. A loss term pulls the model towards the target.
3. The device sends its whole model back.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fleetune.protocols.method.averaging import PersonalDevice, PersonalModel, Task
from fleetune.protocols.method.choice import Budget, Choice, Cost, DeviceReport
from fleetune.protocols.method.method import DeviceId, Round, lazily
from fleetune.protocols.method.trainer import FitPlan, Pull, Trainer
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.codec import estimate_bytes
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Everything

S = TypeVar("S")  # coordinator state


@dataclass(frozen=True)
class Update:
    """An update with the device's model after training."""

    patch: Patch


@dataclass(frozen=True)
class PersonalTargets(PersonalDevice[S, Task, Update]):
    """Both halves of the family, without the coordinator's state. A method defines the targets and their
    pull.
    """

    spec: ModelSpec

    task_type, update_type = Task, Update

    @abstractmethod
    def targets(self, state: S) -> Callable[[DeviceId], FlatArray]:
        """Return a function that makes a participant's target, shape (spec.size,).

        Runs on the coordinator.
        """
        ...

    @abstractmethod
    def pull_towards(self, target: FlatArray) -> Pull:
        """Return the loss term that pulls towards the received target; used on the device."""
        ...

    def plan(self, state: S, round_: Round, key: Key) -> tuple[S, Mapping[DeviceId, Task]]:
        target = self.targets(state)

        def task(device: DeviceId) -> Task:
            return Task(Patch.of(target(device), Everything(), self.spec))

        return state, lazily(round_.participants, task)

    def work(
        self, state: PersonalModel, task: Task, trainer: Trainer, budget: Budget, key: Key
    ) -> tuple[PersonalModel, Update]:
        pull = self.pull_towards(task.patch.apply(state.weights, self.spec))
        fit = trainer.fit(state.weights, FitPlan(pull=pull), key)
        return PersonalModel(fit.weights), Update(Patch.of(fit.weights, Everything(), self.spec))

    def choices(self, report: DeviceReport) -> Sequence[Choice]:
        """Return one choice: whole models both ways. The device also holds its target in memory."""
        whole = estimate_bytes(self.spec.num_parameters)
        return [Choice(1.0, Cost(bytes_down=whole, bytes_up=whole, memory_bytes=4 * self.spec.size))]
