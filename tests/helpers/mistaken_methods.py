"""FedAvg with one mistake each, such as a user's own method may contain."""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from fleetune import ModelAveraging, PersonalModel, SharedModel


class WorkWrites(ModelAveraging):
    def work(self, state, task, trainer, budget, key):
        state.weights[:] = 0  # the mistake
        return super().work(state, task, trainer, budget, key)


class WorkWritesTask(ModelAveraging):
    def work(self, state, task, trainer, budget, key):
        task.patch.values[:] = 0  # the mistake
        return super().work(state, task, trainer, budget, key)


class WorkRaises(ModelAveraging):
    def work(self, state, task, trainer, budget, key):
        raise KeyError("own")  # the mistake


class WorkReturnsNothing(ModelAveraging):
    def work(self, state, task, trainer, budget, key):
        super().work(state, task, trainer, budget, key)


class WorkReturnsStateOnly(ModelAveraging):
    def work(self, state, task, trainer, budget, key):
        return super().work(state, task, trainer, budget, key)[0]


class WorkFloat64(ModelAveraging):
    def work(self, state, task, trainer, budget, key):
        state, update = super().work(state, task, trainer, budget, key)
        return PersonalModel(state.weights.astype(np.float64)), update


class WorkTensor(ModelAveraging):
    def work(self, state, task, trainer, budget, key):
        state, update = super().work(state, task, trainer, budget, key)
        return PersonalModel(torch.from_numpy(state.weights.copy())), update


class UpdateFloat64(ModelAveraging):
    def work(self, state, task, trainer, budget, key):
        state, update = super().work(state, task, trainer, budget, key)
        values = update.patch.values.astype(np.float64)
        return state, replace(update, patch=replace(update.patch, values=values))


class PlanReturnsNothing(ModelAveraging):
    def plan(self, state, round_, key):
        super().plan(state, round_, key)


class PlanRaisesLate(ModelAveraging):
    def plan(self, state, round_, key):
        state, tasks = super().plan(state, round_, key)
        return state, {device: tasks[device] for device in ()} | _Late(round_.participants)


class _Late(dict):
    def __init__(self, participants):
        super().__init__(dict.fromkeys(participants))

    def __ror__(self, other):
        return self

    def __getitem__(self, device):
        raise IndexError(device)  # the mistake


class InitReturnsNothing(ModelAveraging):
    def init_device(self, weights):
        pass


class AggregateWrites(ModelAveraging):
    def aggregate(self, state, updates, combine):
        state.weights[:] = 0  # the mistake
        return super().aggregate(state, updates, combine)


class AggregateNaN(ModelAveraging):
    def aggregate(self, state, updates, combine):
        return SharedModel(super().aggregate(state, updates, combine).weights * np.float32("nan"))


class AggregateReturnsNothing(ModelAveraging):
    def aggregate(self, state, updates, combine):
        super().aggregate(state, updates, combine)


class AggregateFloat64(ModelAveraging):
    def aggregate(self, state, updates, combine):
        return SharedModel(super().aggregate(state, updates, combine).weights.astype(np.float64))


class AggregateTensor(ModelAveraging):
    def aggregate(self, state, updates, combine):
        return SharedModel(torch.from_numpy(super().aggregate(state, updates, combine).weights.copy()))


@dataclass(frozen=True)
class Counts:
    weights: NDArray[np.float32]
    rounds: NDArray[np.int16] = field(default_factory=lambda: np.zeros(1, np.int16))


class StateInt16(ModelAveraging):
    state_type = Counts

    def init_coordinator(self, weights):
        return Counts(weights)
