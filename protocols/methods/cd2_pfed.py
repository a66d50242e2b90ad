"""After CD2-pFed (Shen, Zhou, Yu; CVPR 2022): in every layer some channels are shared, the others private.

One round:

1. The coordinator sends the shared entries. The private share p of each layer's channels grows linearly with
    the rounds, from 0 to `private_share`.
2. The device puts them next to its private entries and trains.
   A loss term pulls the predictions of the shared and the private part of the network together:
   strength * 1/2 * (KL(shared || private) + KL(private || shared)).
3. The device sends the shared entries back. The coordinator averages them by training samples.

The authors published no code, and we know the paper only by its abstract and a review. Our choices:

- The leftmost floor((1 - p) * n) of a layer's n neurons are shared, and at least 1. An entry belongs to its
  output neuron, so p is also the private share of a layer's entries. In the last layer, an entry belongs to
  its input neuron, because the outputs are classes; the bias there is shared.
- One part of the network is the network with all other entries set to 0.
- In the paper, both parts learn from each other in every step. A loss term here needs a fixed teacher, so the
  parts take turns before the whole network trains. First the shared part trains with the private one as
  teacher, then the private part with the new shared one. A round thus trains 2 * `distillation_epochs` more
  than other methods do.
- The first training starts from the shared part alone. A final evaluation reports this model as "before".
- The paper's moving average over local epochs, beta_t w^t + (1 - beta_t) w^(t - 1), is missing, because we do
  not know how beta_t grows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import numpy as np
from msgspec import Meta

from fleetune.protocols.method.averaging import ModelAveraging, PersonalModel, SharedModel, Task, Update
from fleetune.protocols.method.choice import EVALUATION_EPOCHS, Budget, Choice, DeviceReport
from fleetune.protocols.method.diagnostics import Diagnostic, Figure
from fleetune.protocols.method.method import DeviceId, Round, lazily
from fleetune.protocols.method.submodels import cut
from fleetune.protocols.method.trainer import FitPlan, Trainer
from fleetune.protocols.model.loss_terms import Distillation
from fleetune.protocols.model.spec import ALWAYS_ACTIVE, FlatArray, MaskArray, ModelSpec, TensorSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.codec import estimate_bytes
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Entries, neuron_mask, num_active


def shared_entries(spec: ModelSpec, private: float) -> Entries:
    """Return the entries of the leftmost neurons: the share 1 - `private` of every layer."""
    owners = replace(spec, tensors=tuple(map(_owned_by_outputs, spec.tensors)))
    active = [np.arange(neurons) < num_active(neurons, 1 - private) for neurons in spec.groups]
    return Entries(neuron_mask(owners, active)[: spec.num_parameters])


def _owned_by_outputs(tensor: TensorSpec) -> TensorSpec:
    """Return the tensor with only its output axis selectable, if that axis belongs to neurons.

    Other axes count as always active.
    """
    outputs, *inputs = tensor.axes or ((),)
    if not any(span.group != ALWAYS_ACTIVE for span in outputs):
        return tensor
    return replace(tensor, axes=(outputs, *(() for _ in inputs)))


@dataclass(frozen=True)
class CD2pFed(ModelAveraging):
    """The method CD2-pFed, with its settings.

    Attributes:
        private_share: p at its largest, the share of each layer's channels that stays on the device.
        growth_rounds: number of rounds in which p grows from 0 to its largest value; 0 starts at the largest
            value. The default is the run's number of rounds, as in the paper.
        strength: weight of the distillation loss; 0 switches it off.
        temperature: temperature of the class probabilities of both parts.
        distillation_epochs: epochs in which each part learns from the other.
    """

    leak: ClassVar[str | None] = None

    private_share: Annotated[float, Meta(ge=0, lt=1)] = 0.5
    growth_rounds: Annotated[int, Meta(ge=0)] = 100
    strength: Annotated[float, Meta(ge=0)] = 1.0
    temperature: Annotated[float, Meta(gt=0)] = 1.0
    distillation_epochs: Annotated[int, Meta(ge=1, le=1000)] = 1

    tasks = frozenset({"classification"})  # the two parts teach each other class probabilities
    extra_models: ClassVar[int] = 1
    selects_neurons: ClassVar[bool] = True
    diagnostics: ClassVar[tuple[Diagnostic, ...]] = (
        Diagnostic(
            "private_share",
            "private",
            "p: the share of the parameters that stays on the device; it grows to its largest value.",
            "share",
            of="update",
        ),
    )

    @classmethod
    def defaults_of_run(cls, rounds: int) -> Mapping[str, Any]:
        return {"growth_rounds": rounds}

    @property
    def extra_epochs(self) -> float:
        """Extra epochs: those of both parts, and a pass of each teacher over the training samples."""
        return 2 * (self.distillation_epochs + EVALUATION_EPOCHS) if self.strength else 0.0

    def private_at(self, number: int) -> float:
        """Return the private share p of round `number`, counted from 1."""
        grown = number > self.growth_rounds
        return self.private_share * (1.0 if grown else (number - 1) / self.growth_rounds)

    def choices(self, report: DeviceReport) -> Sequence[Choice]:
        """Return the choices with the cost of the first round, which sends the most if p grows.

        The mask is not counted: leftmost neurons form a few runs, which compress to less than 100 bytes.
        """
        size = estimate_bytes(shared_entries(self.spec, self.private_at(1)).count(self.spec))
        [whole] = super().choices(report)
        return [replace(whole, cost=replace(whole.cost, bytes_down=size, bytes_up=size))]

    def plan(
        self, state: SharedModel, round_: Round, key: Key
    ) -> tuple[SharedModel, Mapping[DeviceId, Task]]:
        shared = shared_entries(self.spec, self.private_at(round_.number))
        task = Task(Patch.of(state.weights, shared, self.spec))
        return state, lazily(round_.participants, lambda _: task)

    def work(
        self, state: PersonalModel, task: Task, trainer: Trainer, budget: Budget, key: Key
    ) -> tuple[PersonalModel, Update]:
        start, part = task.patch.apply(state.weights, self.spec), task.patch.selection
        shared = part.mask(self.spec)
        private = ~shared & (np.arange(self.spec.size) < self.spec.num_parameters)
        if self.strength and private.any():
            start = self._distilled(start, shared, private, trainer, key.child("shared"))
            start = self._distilled(start, private, shared, trainer, key.child("private"))
        fit = trainer.fit(start, FitPlan(), key.child("whole"))
        sent = Patch.of(fit.weights, part, self.spec)
        return PersonalModel(fit.weights), Update(sent, trainer.num_samples)

    def diagnose_update(self, update: Update) -> Mapping[str, Figure]:
        return {"private_share": 1 - update.patch.selection.count(self.spec) / self.spec.num_parameters}

    def _distilled(
        self, weights: FlatArray, part: MaskArray, teacher: MaskArray, trainer: Trainer, key: Key
    ) -> FlatArray:
        """Return `weights` after training only `part`, with the part `teacher` as teacher.

        Running statistics do not change.
        """
        loss_term = Distillation(cut(weights, teacher, self.spec), self.strength / 2, self.temperature)
        plan = FitPlan(trainable=part, loss_term=loss_term, epochs=self.distillation_epochs)
        fit = trainer.fit(cut(weights, part, self.spec), plan, key)
        return np.where(part, fit.weights, weights)
