"""FedSPU (Niu, Dong, Qin 2024): personal full models; a random part of the neurons is trained and sent.

One round:

1. For each participant the coordinator draws a share p of every layer's neurons and sends the entries between
    them. Both sides draw from the same key, so positions never travel.
2. The device puts these entries into its own full model, trains only these, and sends only these back.
3. The coordinator averages each entry over the devices that sent it.

The code follows the paper where the authors' code differs (docs/methods.md). In the first and last layer the
active share is p, not the p^2 of Lemma 1, because network inputs and outputs are always active.

`local_model = "sub-model"` removes the paper's idea for comparison (Figs. 4 and 6, against dropout). The same
neurons are drawn and sent, but a device has 0 everywhere else.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from fleetune.protocols.finite import check_finite
from fleetune.protocols.method.averaging import Task, Update, covered_average
from fleetune.protocols.method.choice import EVALUATION_EPOCHS, RATIOS, Budget, Choice, Cost, DeviceReport
from fleetune.protocols.method.diagnostics import Diagnostic, Figure
from fleetune.protocols.method.method import DeviceId, Method, Round, lazily
from fleetune.protocols.method.staleness import blend_with
from fleetune.protocols.method.submodels import ACTIVE_SHARE, cut
from fleetune.protocols.method.trainer import FitPlan, LowerLayers, Trainer
from fleetune.protocols.model.compute_cost import below_largest, work_with_lower
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.codec import estimate_bytes
from fleetune.protocols.update.combine import MEAN, Combine
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Neurons, expected_count

LEAST_DEEP = 0.25  # smallest share of steps: with fewer, a device's lower layers learn too rarely


@dataclass(frozen=True)
class ServerState:
    """The model w, shape (spec.size,), and each device's p."""

    weights: FlatArray
    ratios: dict[DeviceId, float]


@dataclass(frozen=True)
class ClientState:
    """The device's full model, its last L_t, and True if that rose (eq. 6)."""

    weights: FlatArray
    loss: float | None = None
    stopped: bool = False


def stopping_loss(train_loss: float, validation_loss: float, weight: float) -> float:
    """Return L_t = weight * train + (1 - weight) * validation (eq. 6; `weight` is the paper's lambda)."""
    return weight * train_loss + (1 - weight) * validation_loss


def rose(loss: float, previous: float | None) -> bool:
    """True if L_t > L_{t-1} since the device's previous participation (Alg. 2 line 12); the device then
    stops.
    """
    return previous is not None and loss > previous


@dataclass(frozen=True)
class FedSPU(Method[ServerState, ClientState, Task, Update]):
    """The method FedSPU, with its settings.

    Attributes:
        early_stopping: True lets a device leave once its L_t rises (needs data.validation_fraction > 0).
        loss_weight: lambda of eq. 6, weight of the training loss. The paper sets it to its train share, 0.7.
        shallow_steps: True trains the layers below the largest one in a share p of a device's steps, at least
            a quarter. Their gradient is multiplied by the inverse of that share; the other steps skip them
            and take less time. Not every task gains (docs/ratios.md). It does not work with adamw and
            rmsprop, which normalise the length of a step.
        local_model: model that a device trains: its "full" model, frozen outside the drawn neurons, or the
            drawn "sub-model" alone, as with dropout, for comparison.

    In Fleetune's extension, each device's p is the ratio that it reported to fit its limits. A smaller budget
    during work changes nothing, because the task already names the neurons.
    """

    leak: ClassVar[str | None] = None

    spec: ModelSpec
    early_stopping: bool = False
    loss_weight: Annotated[float, Meta(ge=0, le=1)] = 0.7
    local_model: Literal["full", "sub-model"] = "full"
    shallow_steps: bool = False

    state_type, device_state_type = ServerState, ClientState
    task_type, update_type = Task, Update
    semi_asynchronous: ClassVar[bool] = True
    starts_from_task: ClassVar[bool] = True
    selects_neurons: ClassVar[bool] = True
    diagnostics: ClassVar[tuple[Diagnostic, ...]] = (
        ACTIVE_SHARE,
        Diagnostic(
            "devices_at", "devices at each p", "How many devices run at this p.", "count", "round", "ratios"
        ),
    )

    @property
    def needs_validation(self) -> bool:
        return self.early_stopping

    def init_coordinator(self, weights: FlatArray) -> ServerState:
        return ServerState(weights, {})

    def admit(self, state: ServerState, report: DeviceReport) -> ServerState:
        return replace(state, ratios={**state.ratios, report.device: report.ratio})

    def init_device(self, weights: FlatArray) -> ClientState:
        return ClientState(weights)

    def plan(
        self, state: ServerState, round_: Round, key: Key
    ) -> tuple[ServerState, Mapping[DeviceId, Task]]:
        def task(device: DeviceId) -> Task:
            active = Neurons(state.ratios.get(device, 1.0), key.child(device).value)
            return Task(Patch.of(state.weights, active, self.spec))

        return state, lazily(round_.participants, task)

    def work(
        self, state: ClientState, task: Task, trainer: Trainer, budget: Budget, key: Key
    ) -> tuple[ClientState, Update]:
        active = task.patch.selection
        mask, start = active.mask(self.spec), task.patch.apply(state.weights, self.spec)
        if self.local_model == "sub-model":
            start = cut(start, mask, self.spec)
        lower = self.lower(active.ratio) if isinstance(active, Neurons) else None
        fit = trainer.fit(start, FitPlan(trainable=mask, lower=lower), key)
        update = Update(Patch.of(fit.weights, active, self.spec), trainer.num_samples)
        return self._after(state, fit.weights, trainer), update

    @property
    def combines(self) -> bool:
        return True

    def aggregate(
        self, state: ServerState, updates: Iterable[tuple[DeviceId, Update]], combine: Combine = MEAN
    ) -> ServerState:
        return replace(state, weights=covered_average(state.weights, updates, self.spec, combine))

    def discount(self, state: ServerState, update: Update, factor: float) -> Update:
        return replace(update, patch=blend_with(update.patch, state.weights, factor, self.spec))

    def choices(self, report: DeviceReport) -> Sequence[Choice]:
        """Return the choices of ratio, with the traffic, memory and work of each.

        Freezing saves bytes and the optimiser's memory. The work stays 1 except with `shallow_steps`, because
        every tensor has active entries (see `protocols.model.compute_cost`). Early stopping needs the
        training loss. The validation loss, of fewer samples, is not counted.
        """
        return [self._choice(ratio) for ratio in RATIOS]

    def _choice(self, ratio: float) -> Choice:
        count = expected_count(self.spec, ratio)
        size, extra = estimate_bytes(count), EVALUATION_EPOCHS if self.early_stopping else 0.0
        share, lower = count / self.spec.num_parameters, self.lower(ratio)
        work = 1.0 if lower is None else work_with_lower(self.spec, lower.stop, lower.share)
        return Choice(ratio, Cost(size, size, work=work, extra_epochs=extra, trainable_share=share))

    def lower(self, ratio: float) -> LowerLayers | None:
        """Return the layers that train in only a share of the steps; None if there are none."""
        stop = below_largest(self.spec) if self.shallow_steps else 0
        return LowerLayers(stop, max(ratio, LEAST_DEEP)) if stop and ratio < 1 else None

    def diagnose_update(self, update: Update) -> Mapping[str, Figure]:
        """Return the diagnostics of the update; the loss of early stopping never leaves the device."""
        return {"active_share": update.patch.values.size / self.spec.num_parameters}

    def diagnose_round(self, state: ServerState) -> Mapping[str, Figure]:
        return {"devices_at": {f"{p:g}": n for p, n in sorted(Counter(state.ratios.values()).items())}}

    def finished(self, state: ClientState) -> bool:
        return state.stopped

    def _after(self, state: ClientState, weights: FlatArray, trainer: Trainer) -> ClientState:
        if not self.early_stopping:
            return ClientState(weights)
        train, validation = trainer.loss(weights, "train"), trainer.loss(weights, "validation")
        loss = stopping_loss(train, validation, self.loss_weight)
        check_finite(loss, "fedspu: the loss that early stopping goes by")
        return ClientState(weights, loss, rose(loss, state.loss))
