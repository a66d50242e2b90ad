"""SRP-pFed (Hu et al.): small weights are shared, at a rate that a reinforced random walk draws.

Round: the coordinator draws K rates and sends its whole model; a device shares, for each rate p, the p of its
weights that are smallest in magnitude, takes the coordinator's values there, keeps the mixture of least
training loss, trains all of it and sends back the entries that it shared. Each entry is averaged over the
devices that sent it; rates drawn in rounds of low loss become likelier.

Round 1 gives everybody the same model and so the same loss at every rate. A device that joins late, or that
is first chosen late, likewise starts from the coordinator's present model, not from the run's first one; a
device that was away goes on from its own model. Neither needs anything from the coordinator.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from fleetune.protocols.bounds import Loss, NumSamples, Ratio
from fleetune.protocols.finite import check_loss
from fleetune.protocols.methods.srp_pfed.random_walk import (
    Reduction,
    distinct,
    draw,
    increment,
    probabilities,
    reinforce,
)
from fleetune.protocols.model.spec import FlatArray, MaskArray, ModelSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.skeletons.choice import EVALUATION_EPOCHS, Budget, Choice, Cost, DeviceReport
from fleetune.protocols.skeletons.method import DeviceId, Method, Round, lazily
from fleetune.protocols.skeletons.staleness import drawn_towards
from fleetune.protocols.skeletons.trainer import FitPlan, Trainer
from fleetune.protocols.update.codec import estimate_bytes
from fleetune.protocols.update.patch import CoveredMean, Patch
from fleetune.protocols.update.selection import Entries, Everything

Aggregation = Literal["covered", "delta", "literal"]
MAX_RATES = 1000


@dataclass(frozen=True)
class ServerState:
    """w_g, shape (spec.size,); h, float64, shape (num_rates,); the devices' largest rates.

    `drawn` are the indices of the rates of the round under way, without repetition.
    """

    weights: FlatArray
    memory: NDArray[np.float64]
    ratios: dict[DeviceId, float]
    drawn: tuple[int, ...] = ()


@dataclass(frozen=True)
class ClientState:
    """w_i, shape (spec.size,), and whether it has been trained here."""

    weights: FlatArray
    trained: bool = False


@dataclass(frozen=True)
class Task:
    """The whole w_g, and the rates to try in this order."""

    patch: Patch
    rates: Annotated[tuple[Ratio, ...], Meta(min_length=1, max_length=MAX_RATES)]


@dataclass(frozen=True)
class Update:
    """The shared entries after training, and the training loss of the mixture before it."""

    patch: Patch
    num_samples: NumSamples
    loss: Loss


def num_shared(rate: float, size: int) -> int:
    """How many of `size` entries are shared: rate * size, half up, within 1..size."""
    return min(size, max(1, math.floor(rate * size + 0.5)))


def shared_mask(weights: FlatArray, rate: float) -> MaskArray:
    """The `num_shared` entries of least magnitude (section III-A2); of equals the first ones."""
    magnitude, count = np.abs(weights), num_shared(rate, weights.size)
    threshold = np.partition(magnitude, count - 1)[count - 1]
    mask: MaskArray = magnitude < threshold
    equal = np.flatnonzero(magnitude == threshold)
    mask[equal[: count - np.count_nonzero(mask)]] = True
    return mask


def fuse(mask: MaskArray, shared: FlatArray, own: FlatArray) -> FlatArray:
    """Shared values where the mask is True, own ones elsewhere (eq. 5)."""
    return np.where(mask, shared, own)


def choose(losses: Sequence[float]) -> int | None:
    """Index of the least loss, the first of equals (eq. 8); None if none is finite."""
    finite = [index for index, loss in enumerate(losses) if math.isfinite(loss)]
    return min(finite, key=losses.__getitem__, default=None)


def merge(previous: FlatArray, mean: CoveredMean, num_samples: float, how: Aggregation) -> FlatArray:
    """The next w_g from sum(n m w), sum(n m) and sum(n) over the updates; n are the training samples.

    covered: each entry's mean over the devices that sent it; what nobody sent stays.
    delta: previous + sum(n m (w - previous)) / sum(n), the form of the proof (eq. 16).
    literal: sum(n m w) / sum(n) (eq. 4), where entries shrink that not everybody sends.
    """
    if how == "covered" or not num_samples:
        return mean.over(previous)
    base = previous if how == "delta" else np.zeros_like(previous)
    return (base + (mean.sums - mean.weights * base) / num_samples).astype(previous.dtype)


@dataclass(frozen=True)
class SRPpFed(Method[ServerState, ClientState, Task, Update]):
    """Settings.

    Attributes:
        num_rates: c; the candidates are 1/c, 2/c, ..., 1.
        draws: K, with replacement.
        decay: lambda of eq. 6. The paper gives none.
        aggregation: `covered`, each entry's mean over the devices that sent it; `delta`, the form of the
            proof (eq. 16); or `literal`, eq. 4 as printed, which drives w_g to zero (docs/methods.md).
        loss: by which a round's rates are credited, the "mean" or the "sum" of the devices' losses.
        ranking: magnitudes are compared over the whole "model" or within each "layer".

    The ratio a device reports bounds its rates: it tries those drawn that fit, else the largest candidate
    that does. That is Fleetune's extension; the paper's rates know nothing of resources.
    """

    spec: ModelSpec
    num_rates: Annotated[int, Meta(ge=1, le=MAX_RATES)] = 10
    draws: Annotated[int, Meta(ge=1, le=MAX_RATES)] = 2
    decay: Annotated[float, Meta(gt=0, lt=1)] = 0.9
    aggregation: Aggregation = "covered"
    loss: Reduction = "mean"
    ranking: Literal["model", "layer"] = "model"

    state_type, device_state_type = ServerState, ClientState
    task_type, update_type = Task, Update
    semi_asynchronous: ClassVar[bool] = True

    @property
    def rates(self) -> list[float]:
        """The candidates, ascending."""
        return [(index + 1) / self.num_rates for index in range(self.num_rates)]

    def init_coordinator(self, weights: FlatArray) -> ServerState:
        return ServerState(weights, np.ones(self.num_rates), {})

    def admit(self, state: ServerState, report: DeviceReport) -> ServerState:
        return replace(state, ratios={**state.ratios, report.device: report.ratio})

    def init_device(self, weights: FlatArray) -> ClientState:
        return ClientState(weights)

    def plan(
        self, state: ServerState, round_: Round, key: Key
    ) -> tuple[ServerState, Mapping[DeviceId, Task]]:
        u = 1 - key.child("rates").uniform(self.draws)
        drawn = distinct(draw(probabilities(state.memory), u))
        whole = Patch.of(state.weights, Everything(), self.spec)
        tasks = lazily(
            round_.participants,
            lambda device: Task(whole, self._affordable(drawn, state.ratios.get(device, 1.0))),
        )
        return replace(state, drawn=drawn), tasks

    def work(
        self, state: ClientState, task: Task, trainer: Trainer, budget: Budget, key: Key
    ) -> tuple[ClientState, Update]:
        shared = task.patch.apply(state.weights, self.spec)
        own = state.weights if state.trained else shared
        mask, start, loss = self._cluster(own, shared, task.rates, trainer)
        check_loss(loss, "srp-pfed: the training loss before training")
        fit = trainer.fit(start, FitPlan(), key)
        sent = Patch.of(fit.weights, Entries(mask[: self.spec.num_parameters]), self.spec)
        return ClientState(fit.weights, trained=True), Update(sent, trainer.num_samples, loss)

    def aggregate(self, state: ServerState, updates: Iterable[tuple[DeviceId, Update]]) -> ServerState:
        mean, num_samples, losses = CoveredMean(self.spec), 0, []
        for _, update in updates:
            mean.add(update.patch, update.num_samples)
            num_samples += update.num_samples
            losses.append(update.loss)
        weights, parameters = state.weights.copy(), slice(0, self.spec.num_parameters)
        weights[parameters] = merge(state.weights, mean, num_samples, self.aggregation)[parameters]
        gain = increment(losses, self.loss)
        memory = reinforce(state.memory, state.drawn, gain, self.decay)
        return replace(state, weights=weights, memory=memory, drawn=())

    def discount(self, state: ServerState, update: Update, factor: float) -> Update:
        """Section III-D. The loss counts whole, for the rates drawn last, which may not be the update's."""
        return replace(update, patch=drawn_towards(update.patch, state.weights, factor, self.spec))

    def choices(self, report: DeviceReport) -> Sequence[Choice]:
        """Always the whole model down; up, the shared entries and a bitmap of where they are. A loss for
        each rate drawn, if all differ and fit.
        """
        return [Choice(rate, self._cost(rate)) for rate in self.rates]

    def _cost(self, rate: float) -> Cost:
        size, fitting = self.spec.num_parameters, sum(other <= rate for other in self.rates)
        return Cost(
            bytes_down=estimate_bytes(size),
            bytes_up=size // 8 + estimate_bytes(num_shared(rate, size)),
            extra_epochs=EVALUATION_EPOCHS * min(self.draws, fitting),
        )

    def _affordable(self, drawn: Sequence[int], limit: float) -> tuple[float, ...]:
        fitting = tuple(self.rates[index] for index in drawn if self.rates[index] <= limit)
        return fitting or (max((rate for rate in self.rates if rate <= limit), default=self.rates[0]),)

    def _cluster(
        self, own: FlatArray, shared: FlatArray, rates: Sequence[float], trainer: Trainer
    ) -> tuple[MaskArray, FlatArray, float]:
        """The mask and mixture of least training loss, and that loss (Alg. 2, CLIENTCLUSTERING).

        Differs from the paper, whose cost analysis takes these losses on the test set. When no mixture has
        a finite loss, the device goes on from its own model and shares at the first rate.
        """
        losses = [trainer.loss(fuse(self._mask(own, rate), shared, own)) for rate in rates]
        best = choose(losses)
        mask = self._mask(own, rates[best or 0])
        if best is None:
            return mask, own, trainer.loss(own)
        return mask, fuse(mask, shared, own), losses[best]

    def _mask(self, weights: FlatArray, rate: float) -> MaskArray:
        """Which entries are shared, shape (spec.size,); running statistics never are."""
        mask = np.zeros(self.spec.size, dtype=bool)
        whole = [slice(0, self.spec.num_parameters)]
        for part in whole if self.ranking == "model" else self.spec.layers.values():
            mask[part] = shared_mask(weights[part], rate)
        return mask
