"""After CD2-pFed (Shen, Zhou, Yu; CVPR 2022): in every layer some channels are shared, the others private.

Round: the coordinator sends the shared entries; the device puts them beside its private ones, trains, and
sends the shared ones back, which are averaged by training samples. The private share p of each layer's
channels grows linearly with the rounds from 0 to its largest value. A loss term holds the predictions of the
two parts of the network, the shared and the private one, to each other: strength * 1/2 * (KL(shared ||
private) + KL(private || shared)).

That much is the paper's, which we know by its abstract and a review, not by its text; there is no public code
of its authors. Ours:

- The leftmost neurons of a layer are the shared ones, floor((1 - p) * n) of n, and at least 1. An entry
  belongs to its output neuron, so that p is also the private share of a layer's entries; in the last layer,
  whose outputs are classes, to its input neuron, and the bias there is shared.
- One part of the network is the network with all other entries 0.
- In the paper both parts learn from each other in every step, with the whole network's loss beside it. A
  loss term here is a fixed model, so they take turns: before the whole network is trained, the shared part is
  trained with the private one as teacher, then the private one with the shared one as it then is, each on
  the data's loss too. A round therefore trains for 2 * `distillation_epochs` more than others do, and its
  first training starts from the shared part alone: that is what a final evaluation says of "before".
- The paper's moving average over local epochs t is left out: w^t becomes beta_t w^t + (1 - beta_t) w^(t - 1),
  and we know neither the ramp of beta_t nor its end.
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
    """The entries of the leftmost neurons, at the share 1 - `private` of every layer's."""
    owners = replace(spec, tensors=tuple(map(_owned_by_outputs, spec.tensors)))
    active = [np.arange(neurons) < num_active(neurons, 1 - private) for neurons in spec.groups]
    return Entries(neuron_mask(owners, active)[: spec.num_parameters])


def _owned_by_outputs(tensor: TensorSpec) -> TensorSpec:
    """The tensor with all axes always active but that of its outputs, where these are neurons."""
    outputs, *inputs = tensor.axes or ((),)
    if not any(span.group != ALWAYS_ACTIVE for span in outputs):
        return tensor
    return replace(tensor, axes=(outputs, *(() for _ in inputs)))


@dataclass(frozen=True)
class CD2pFed(ModelAveraging):
    """Settings.

    Attributes:
        private_share: p at its largest.
        growth_rounds: the rounds in which p grows from 0 to that; 0: it is that from the start. A run that
            leaves it open begins with its number of rounds: in the paper p grows until the last one.
        strength: of the distillation; 0: none.
        temperature: of both parts' class probabilities.
        distillation_epochs: of each part.
    """

    private_share: Annotated[float, Meta(ge=0, lt=1)] = 0.5
    growth_rounds: Annotated[int, Meta(ge=0)] = 100
    strength: Annotated[float, Meta(ge=0)] = 1.0
    temperature: Annotated[float, Meta(gt=0)] = 1.0
    distillation_epochs: Annotated[int, Meta(ge=1, le=1000)] = 1

    tasks = frozenset({"classification"})  # its two parts teach each other class probabilities
    extra_models: ClassVar[int] = 1
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
        """Each part trains its own epochs, and needs the other's answers on the training samples."""
        return 2 * (self.distillation_epochs + EVALUATION_EPOCHS) if self.strength else 0.0

    def private_at(self, number: int) -> float:
        """The p of round `number`, which counts from 1."""
        grown = number > self.growth_rounds
        return self.private_share * (1.0 if grown else (number - 1) / self.growth_rounds)

    def choices(self, report: DeviceReport) -> Sequence[Choice]:
        """The first round's entries; where p grows these are all, later ones fewer. Their mask is priced at
        nothing: leftmost neurons are a few runs, of which a payload's compression leaves less than 100 bytes.
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
        """`weights` with `part` trained alone, taught by the part `teacher`. Running statistics stay."""
        loss_term = Distillation(cut(weights, teacher, self.spec), self.strength / 2, self.temperature)
        plan = FitPlan(trainable=part, loss_term=loss_term, epochs=self.distillation_epochs)
        fit = trainer.fit(cut(weights, part, self.spec), plan, key)
        return np.where(part, fit.weights, weights)
