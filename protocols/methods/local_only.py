"""Local-only: every device trains alone; the baseline that each collaboration has to beat."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from fleetune.protocols.method.averaging import ModelAveraging, PersonalModel, SharedModel, Task, Update
from fleetune.protocols.method.choice import Budget, Choice, Cost, DeviceReport
from fleetune.protocols.method.method import DeviceId, Round, lazily
from fleetune.protocols.method.trainer import FitPlan, Trainer
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.codec import estimate_bytes
from fleetune.protocols.update.combine import MEAN, Combine
from fleetune.protocols.update.patch import NOTHING


@dataclass(frozen=True)
class LocalOnly(ModelAveraging):
    """The method local-only, which has no settings; both sides send empty patches."""

    leak: ClassVar[str | None] = "devices send no updates, so there is nothing to protect"

    by_samples = False
    not_combined: ClassVar[str] = "its devices send no weights"

    def plan(
        self, state: SharedModel, round_: Round, key: Key
    ) -> tuple[SharedModel, Mapping[DeviceId, Task]]:
        return state, lazily(round_.participants, lambda _: Task(NOTHING))

    def work(
        self, state: PersonalModel, task: Task, trainer: Trainer, budget: Budget, key: Key
    ) -> tuple[PersonalModel, Update]:
        fit = trainer.fit(state.weights, FitPlan(), key)
        return PersonalModel(fit.weights), Update(NOTHING, trainer.num_samples)

    @property
    def combines(self) -> bool:
        return False

    def aggregate(
        self, state: SharedModel, updates: Iterable[tuple[DeviceId, Update]], combine: Combine = MEAN
    ) -> SharedModel:
        for _ in updates:  # reading the updates finds a corrupt one here, as with every other method
            pass
        return state

    def choices(self, report: DeviceReport) -> Sequence[Choice]:
        return [Choice(1.0, Cost(bytes_down=estimate_bytes(0), bytes_up=estimate_bytes(0)))]
