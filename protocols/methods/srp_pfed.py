"""SRP-pFed (Hu et al.): small weights are shared, at a rate drawn by a reinforced random walk.

One round:

1. The coordinator draws K rates and sends its whole model.
2. For each rate p, the device takes the coordinator's values at the share p of its own smallest weights (by
    magnitude). It keeps the mixture with the least training loss, trains all of it, and sends the shared
    entries back.
3. The coordinator averages each entry over the devices that sent it. Rates used in rounds of low loss become
    likelier.

In round 1 all devices have the same model and thus the same loss at every rate, so the first drawn rate is
used. A late joiner starts as `first` says. A device that was away continues from its own model.

Differs from the paper: a device's ratio r limits its round (Fleetune's extension). Below 1 the device is sent
the share r of the coordinator's entries, other ones in every round (`DrawnEntries`), and shares among these.
At r = 1 the round is the paper's to the bit.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from fleetune.protocols.bounds import Loss, NumSamples, Ratio
from fleetune.protocols.finite import check_loss
from fleetune.protocols.method.choice import EVALUATION_EPOCHS, RATIOS, Budget, Choice, Cost, DeviceReport
from fleetune.protocols.method.diagnostics import Diagnostic, Figure
from fleetune.protocols.method.method import DeviceId, Method, Round, lazily
from fleetune.protocols.method.staleness import blend_with
from fleetune.protocols.method.trainer import FitPlan, Rows, Trainer
from fleetune.protocols.model.spec import FlatArray, MaskArray, ModelSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.codec import estimate_bitmap_bytes, estimate_bytes
from fleetune.protocols.update.combine import MEAN, Combination, Combine, CoveredMean
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import DrawnEntries, Entries, Everything

MAX_RATES = 1000


@dataclass(frozen=True)
class ServerState:
    """The coordinator's state between rounds.

    Attributes:
        weights: w_g, shape (spec.size,).
        memory: h, one float64 number for each candidate rate.
        ratios: ratio that each device's budget allows.
        drawn: indices of the present round's rates, without repetition.
        used: indices of the rates that the last round credited, ascending.
    """

    weights: FlatArray
    memory: NDArray[np.float64]
    ratios: dict[DeviceId, float]
    drawn: tuple[int, ...] = ()
    used: tuple[int, ...] = ()


@dataclass(frozen=True)
class ClientState:
    """A device's state between rounds: w_i, shape (spec.size,), and True if it has been trained here."""

    weights: FlatArray
    trained: bool = False


@dataclass(frozen=True)
class Task:
    """w_g, whole or a share of its entries, and the rates to try, in this order."""

    patch: Patch
    rates: Annotated[tuple[Ratio, ...], Meta(min_length=1, max_length=MAX_RATES)]


@dataclass(frozen=True)
class Update:
    """Result of a device's round.

    Attributes:
        patch: shared entries after training.
        num_samples: number of training samples.
        loss: training loss of the mixture before training.
    """

    patch: Patch
    num_samples: NumSamples
    loss: Loss


@dataclass(frozen=True)
class RatedUpdate(Update):
    """An update with the rate at which the device shared; None in updates that do not report it
    (`credit`).
    """

    rate: Ratio | None = None


Aggregation = Literal["covered", "delta", "literal"]


def num_shared(rate: float, size: int) -> int:
    """Return the number of shared entries among `size`: rate * size, half rounded up, within 1..size."""
    return min(size, max(1, math.floor(rate * size + 0.5)))


def shared_mask(weights: FlatArray, rate: float) -> MaskArray:
    """Mark the `num_shared` entries of least magnitude (section III-A2). Ties go to the first entry."""
    magnitude, count = np.abs(weights), num_shared(rate, weights.size)
    threshold = np.partition(magnitude, count - 1)[count - 1]
    mask: MaskArray = magnitude < threshold
    equal = np.flatnonzero(magnitude == threshold)
    mask[equal[: count - np.count_nonzero(mask)]] = True
    return mask


def fuse(mask: MaskArray, shared: FlatArray, own: FlatArray) -> FlatArray:
    """Return the mixed model: shared values where the mask is True, own values elsewhere (eq. 5)."""
    return np.where(mask, shared, own)


def choose(losses: Sequence[float]) -> int | None:
    """Return the index of the least loss (eq. 8), the first among ties; None if no loss is finite."""
    finite = [index for index, loss in enumerate(losses) if math.isfinite(loss)]
    return min(finite, key=losses.__getitem__, default=None)


def merge(previous: FlatArray, combination: Combination, num_samples: float, how: Aggregation) -> FlatArray:
    """Return the next w_g from the sums over the updates.

    Args:
        previous: w_g of the present round, shape (spec.size,).
        combination: sum(n m w) and sum(n m), with n training samples, mask m and weights w of each update.
        num_samples: sum(n).
        how: `covered` averages each entry over the devices that sent it; an entry that no device sent stays.
            `delta` is previous + sum(n m (w - previous)) / sum(n), the form of the proof (eq. 16). `literal`
            is sum(n m w) / sum(n) (eq. 4), which shrinks entries that only some devices send.
    """
    if how == "covered" or not num_samples or not isinstance(combination, CoveredMean):
        return combination.over(previous)
    base = previous if how == "delta" else np.zeros_like(previous)
    return (base + (combination.sums - combination.weights * base) / num_samples).astype(previous.dtype)


Reduction = Literal["mean", "sum"]


def probabilities(memory: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the probability of each rate, its share of h (eq. 7), shape (c,).

    The result is uniform if the sum of h is 0 or overflows.
    """
    total = float(memory.sum())
    if not 0 < total < math.inf:
        return np.full(memory.size, 1 / memory.size)
    chances: NDArray[np.float64] = memory / total
    return chances


def draw(chances: NDArray[np.float64], u: NDArray[np.float64]) -> list[int]:
    """Draw a rate for each number in `u`: the smallest index j with F_j >= u (Alg. 2, SAMPLEUPDATERATE).

    Args:
        chances: probability of each rate, shape (c,). F is their cumulative sum.
        u: uniform random numbers in (0, 1].
    """
    last = chances.size - 1  # rounding may leave the last F just below 1
    return [min(int(j), last) for j in np.searchsorted(np.cumsum(chances), u, side="left")]


def distinct(drawn: Iterable[int]) -> tuple[int, ...]:
    """Return the drawn indices without repetition, in the order of their first draw."""
    return tuple(dict.fromkeys(drawn))


def increment(losses: Sequence[float], reduction: Reduction) -> float:
    """Return the credit b of a round (eq. 6): 1 - sigmoid(loss).

    Differs from the paper: the loss is the mean over devices unless `reduction` is "sum". The credit of a sum
    is almost 0: ten devices with a loss of 2.3 give 1e-10, and h decays to zero.
    """
    total = sum(losses)
    loss = total / max(1, len(losses)) if reduction == "mean" else total
    grown = math.exp(-abs(loss))
    return (grown if loss > 0 else 1.0) / (1.0 + grown)


def reinforce(
    memory: NDArray[np.float64], drawn: Sequence[int], gain: float, decay: float
) -> NDArray[np.float64]:
    """Return the next h: decay * h, plus `gain` once for each rate in `drawn` (eq. 6; `decay` is lambda)."""
    renewed = decay * memory
    renewed[list(distinct(drawn))] += gain
    return renewed


DIAGNOSTICS = (
    Diagnostic(
        "probabilities",
        "chance of each rate",
        "pi of eq. 7, after the round's credit: uniform at the start, it gathers on rates that were used in"
        " rounds of low loss.",
        "share",
        "round",
        "rates",
    ),
    Diagnostic(
        "rates_credited", "rates credited", "How many different rates the round credited.", "count", "round"
    ),
    Diagnostic(
        "rate",
        "rate used",
        "p_i, the share of what it was sent that the device shared: that of least loss among those drawn.",
        "share",
        "update",
    ),
    Diagnostic(
        "mixture_loss",
        "loss of the mixture",
        "f_i of the mixture before training, which decides the rates' credit.",
        "number",
        "update",
    ),
    Diagnostic(
        "shared", "share sent", "The share of all parameters that the device sent.", "share", "update"
    ),
)


@dataclass(frozen=True)
class SRPpFed(Method[ServerState, ClientState, Task, Update]):
    """The method SRP-pFed, with its settings.

    Attributes:
        num_rates: c, number of candidate rates 1/c, 2/c, ..., 1.
        draws: K, number of rates drawn, with replacement; 1 is Table VII's variant without client clustering
            (CL).
        decay: lambda of eq. 6, share of its memory that a rate keeps each round. The paper gives no value.
        memory: True credits the rates of rounds with low loss (Table VII's RM). False keeps all rates equally
            likely (RD).
        fixed_rates: candidates that are all tried in every round; then no rate is drawn (Table VII without RD
            and RM). The table's rates are "rules of CD2-pFed", without values.
        credit: rates that a round's loss credits. `used` credits each used rate once. `drawn` credits all
            drawn rates, as printed in eq. 6, even rates that no device used or could afford.
        aggregation: how updates are merged. `covered` takes each entry's mean over the devices that sent it.
            `delta` is the form of the proof (eq. 16). `literal` is eq. 4 as printed, which drives w_g to zero
            (docs/methods.md).
        loss: figure that credits a round's rates, the "mean" or the "sum" of the devices' losses.
        loss_share: share of the training samples on which mixtures are compared, drawn anew each round. The
            paper's cost analysis uses the test set, a fifth as many.
        ranking: entries among which magnitudes are compared: the whole "model", or each "layer".
        first: start of a device's first round. `shared` mixes with the coordinator's present model. `own`
            mixes with the common initial weights (w_i^1 of Algorithm 1).
        downlink: what a device of ratio r is sent. `share` sends that share of the entries and allows any
            rate. `whole` sends the whole model and allows no rate above r.
    """

    leak: ClassVar[str | None] = "a device chooses by its data which entries it sends, and reports losses"

    spec: ModelSpec
    num_rates: Annotated[int, Meta(ge=1, le=MAX_RATES)] = 10
    draws: Annotated[int, Meta(ge=1, le=MAX_RATES)] = 2
    decay: Annotated[float, Meta(gt=0, lt=1)] = 0.9
    memory: bool = True
    fixed_rates: Annotated[tuple[Ratio, ...], Meta(max_length=MAX_RATES)] = ()
    credit: Literal["used", "drawn"] = "drawn"
    aggregation: Aggregation = "covered"
    loss: Reduction = "mean"
    loss_share: Ratio = 1.0
    ranking: Literal["model", "layer"] = "model"
    first: Literal["shared", "own"] = "shared"
    downlink: Literal["share", "whole"] = "whole"

    state_type, device_state_type = ServerState, ClientState
    task_type, update_type = Task, RatedUpdate
    not_combined: ClassVar[str] = (
        "its aggregation delta or literal also divides by the samples of devices that did not send the entry"
    )
    semi_asynchronous: ClassVar[bool] = True
    starts_from_task: ClassVar[bool] = True
    diagnostics: ClassVar[tuple[Diagnostic, ...]] = DIAGNOSTICS

    @classmethod
    def defaults_of_run(cls, rounds: int) -> Mapping[str, Any]:  # noqa: ARG003 - whatever they are
        """Return settings of a new run that differ from the paper's."""
        return {"credit": "used", "downlink": "share"}

    @classmethod
    def defaults_of_objective(cls) -> Mapping[str, Any]:
        """Return defaults that reduce the cost of comparing mixtures, for runs with an objective."""
        return {"loss_share": 0.2}

    @property
    def rates(self) -> list[float]:
        """The candidate rates, ascending."""
        if self.fixed_rates:
            return sorted(set(self.fixed_rates))
        return [(index + 1) / self.num_rates for index in range(self.num_rates)]

    def init_coordinator(self, weights: FlatArray) -> ServerState:
        return ServerState(weights, np.ones(len(self.rates)), {})

    def admit(self, state: ServerState, report: DeviceReport) -> ServerState:
        return replace(state, ratios={**state.ratios, report.device: report.ratio})

    def init_device(self, weights: FlatArray) -> ClientState:
        return ClientState(weights)

    def start_from(self, state: ClientState, weights: FlatArray) -> ClientState:
        return ClientState(weights, trained=True)

    def plan(
        self, state: ServerState, round_: Round, key: Key
    ) -> tuple[ServerState, Mapping[DeviceId, Task]]:
        drawn = self._drawn(state, key.child("rates"))
        whole = Patch.of(state.weights, Everything(), self.spec)

        def task(device: DeviceId) -> Task:
            ratio = state.ratios.get(device, 1.0)
            if self.downlink == "whole":
                return Task(whole, self._affordable(drawn, ratio))
            rates = tuple(self.rates[index] for index in drawn)
            if ratio >= 1:
                return Task(whole, rates)
            sent = DrawnEntries.of_round(ratio, round_.number, Key.of("downlink", device))
            return Task(Patch.of(state.weights, sent, self.spec), rates)

        return replace(state, drawn=drawn), lazily(round_.participants, task)

    def work(
        self, state: ClientState, task: Task, trainer: Trainer, budget: Budget, key: Key
    ) -> tuple[ClientState, Update]:
        shared = task.patch.apply(state.weights, self.spec)
        own = state.weights if state.trained or self.first == "own" else shared
        rate, mask, start, loss = self._cluster(own, shared, task, trainer, key.child("loss"))
        check_loss(loss, "srp-pfed: the training loss before training")
        fit = trainer.fit(start, FitPlan(), key)
        sent = Patch.of(fit.weights, Entries(mask[: self.spec.num_parameters]), self.spec)
        content = sent, trainer.num_samples, loss
        update = RatedUpdate(*content, rate) if self.credit == "used" else Update(*content)
        return ClientState(fit.weights, trained=True), update

    @property
    def combines(self) -> bool:
        return self.aggregation == "covered"

    def aggregate(
        self, state: ServerState, updates: Iterable[tuple[DeviceId, Update]], combine: Combine = MEAN
    ) -> ServerState:
        covered = self.aggregation == "covered"
        combination: Combination = combine(self.spec) if covered else CoveredMean(self.spec)
        num_samples, losses, used = 0, [], set[int]()
        for _, update in updates:
            combination.add(update.patch, update.num_samples)
            num_samples += update.num_samples
            losses.append(update.loss)
            used.update(self._credited(update, state.drawn))
        weights, parameters = state.weights.copy(), slice(0, self.spec.num_parameters)
        weights[parameters] = merge(state.weights, combination, num_samples, self.aggregation)[parameters]
        credited, gain = tuple(sorted(used)), increment(losses, self.loss)
        memory = reinforce(state.memory, credited, gain, self.decay) if self.memory else state.memory
        return replace(state, weights=weights, memory=memory, drawn=(), used=credited)

    def discount(self, state: ServerState, update: Update, factor: float) -> Update:
        """Discount a stale update (section III-D); its loss keeps its full weight."""
        return replace(update, patch=blend_with(update.patch, state.weights, factor, self.spec))

    def diagnose_update(self, update: Update) -> Mapping[str, Figure]:
        shared = update.patch.values.size / self.spec.num_parameters
        rate = _rate_of(update)
        return {"mixture_loss": update.loss, "shared": shared, **({} if rate is None else {"rate": rate})}

    def diagnose_round(self, state: ServerState) -> Mapping[str, Figure]:
        chances = probabilities(state.memory)
        by_rate = {f"{rate:g}": float(chance) for rate, chance in zip(self.rates, chances, strict=True)}
        return {"probabilities": by_rate, "rates_credited": len(state.used)}

    def choices(self, report: DeviceReport) -> Sequence[Choice]:
        """Return the choices of ratio, with the traffic and work of each.

        A device receives its share of the entries, and sends at most as many, with their places. Each round
        draws how many fewer it sends. The work has one loss for each rate, the most if all drawn rates
        differ.
        """
        ratios = self.rates if self.downlink == "whole" else RATIOS
        return [Choice(ratio, self._cost(ratio)) for ratio in ratios]

    def _cost(self, ratio: float) -> Cost:
        size, whole = self.spec.num_parameters, self.downlink == "whole"
        fitting = sum(rate <= ratio for rate in self.rates) if whole else len(self.rates)
        tried = fitting if self.fixed_rates else min(self.draws, fitting)
        shared = num_shared(ratio if whole else ratio * max(self.rates), size)
        bitmap = estimate_bitmap_bytes(shared, size)
        return Cost(
            bytes_down=estimate_bytes(size if whole else num_shared(ratio, size)),
            bytes_up=bitmap + estimate_bytes(shared),
            extra_epochs=EVALUATION_EPOCHS * tried * self.loss_share,
            bytes_vary=True,
            mask_bytes_up=bitmap,
        )

    def _drawn(self, state: ServerState, key: Key) -> tuple[int, ...]:
        if self.fixed_rates:
            return tuple(range(len(self.rates)))
        return distinct(draw(probabilities(state.memory), 1 - key.uniform(self.draws)))

    def _affordable(self, drawn: Sequence[int], limit: float) -> tuple[float, ...]:
        fitting = tuple(self.rates[index] for index in drawn if self.rates[index] <= limit)
        return fitting or (max((rate for rate in self.rates if rate <= limit), default=self.rates[0]),)

    def _credited(self, update: Update, drawn: Sequence[int]) -> Iterable[int]:
        """Return the indices of the candidates that an update credits; none if its rate is unknown."""
        used = _rate_of(update)
        if self.credit == "drawn" or used is None:
            return drawn
        return [index for index, rate in enumerate(self.rates) if rate == used]

    def _cluster(
        self, own: FlatArray, shared: FlatArray, task: Task, trainer: Trainer, key: Key
    ) -> tuple[float, MaskArray, FlatArray, float]:
        """Return rate, mask and mixture with the least training loss, and that loss (Alg. 2,
        CLIENTCLUSTERING).

        Differs from the paper: its cost analysis takes these losses on the test set. If no mixture has a
        finite loss, the device continues from its own model and shares at the first rate.
        """
        candidates, rows = self._candidates(task.patch), self._rows(trainer, key)
        masks = (self._mask(own, rate, candidates) for rate in task.rates)
        losses = [trainer.loss(fuse(mask, shared, own), rows=rows) for mask in masks]
        best = choose(losses)
        rate = task.rates[best or 0]
        mask = self._mask(own, rate, candidates)
        if best is None:
            return rate, mask, own, trainer.loss(own, rows=rows)
        return rate, mask, fuse(mask, shared, own), losses[best]

    def _rows(self, trainer: Trainer, key: Key) -> Rows | None:
        """Return the samples on which mixtures are compared; None for all samples."""
        if self.loss_share == 1 or not trainer.num_samples:
            return None
        return key.sample(num_shared(self.loss_share, trainer.num_samples), trainer.num_samples)

    def _candidates(self, sent: Patch) -> list[NDArray[np.intp]]:
        """Return the received entries as one group, or one group a layer; magnitudes are ranked within a
        group.
        """
        here = sent.selection.mask(self.spec)
        parts = [slice(0, here.size)] if self.ranking == "model" else list(self.spec.layers.values())
        return [part.start + np.flatnonzero(here[part]) for part in parts]

    def _mask(self, own: FlatArray, rate: float, candidates: Sequence[NDArray[np.intp]]) -> MaskArray:
        """Mark the shared entries, shape (spec.size,); running statistics are never shared."""
        mask = np.zeros(self.spec.size, dtype=bool)
        for entries in candidates:
            if entries.size:
                mask[entries[shared_mask(own[entries], rate)]] = True
        return mask


def _rate_of(update: Update) -> float | None:
    return update.rate if isinstance(update, RatedUpdate) else None
