"""FedPURIN (Xie, He, Shi): devices send only the weights that matter most to their loss.

Round t:

1. A device trains its whole model and scores every entry by |gradient * weight|. It marks the top tau of each
    tensor as critical (m_i) and sends these. Normalisation layers stay on the device.
2. Devices with similar masks average their critical entries (delta_i).
3. The mean of all sent entries (bar) gives the other entries of each device's next model.

Differs from the paper: a device's next model travels when the device next takes part, not at once. Only
entries that the device does not know travel. Entries where bar is 0 do not travel. Its own critical entries
do not travel if it has no collaborators, as is always so after t = beta. The coordinator therefore stores m_i
of every device (1 bit an entry on disk), and delta_i of the last round for devices with collaborators.

The paper has every device in every round. With partial participation:

- bar and the overlaps cover the devices whose updates arrived in a round.
- A device that was absent from the last round keeps its critical entries, like every device after beta, and
  takes the newest bar elsewhere. (Storing delta_i until it returns was 2 to 3 points worse on digits with 4
  of 16 devices a round, and costs the coordinator one model for each device.)
- The coordinator may lack a device's latest update (late joiner, lost update, abandoned round). Such a device
  does the same, but keeps its own weights where bar is 0, because it cannot tell a zero of bar from an
  omitted entry.
- An update's values for normalisation layers are ignored.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from msgspec import Meta

from fleetune.protocols.bounds import Number, NumSamples, Ratio
from fleetune.protocols.finite import check_finite
from fleetune.protocols.method.choice import RATIOS, Budget, Choice, Cost, DeviceReport
from fleetune.protocols.method.critical_parameters import (
    COLLABORATION_DIAGNOSTICS,
    EARLIER_BETA,
    Collaboration,
    Floats,
    beta_of_run,
    collaborated_models,
    collaboration_figures,
    critical_entries,
    masked_mean,
    perturbation,
)
from fleetune.protocols.method.diagnostics import Diagnostic, Figure
from fleetune.protocols.method.method import DeviceId, Method, Round, lazily
from fleetune.protocols.method.trainer import FitPlan, Trainer
from fleetune.protocols.model.spec import FlatArray, Kind, MaskArray, ModelSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.codec import estimate_bitmap_bytes, estimate_bytes
from fleetune.protocols.update.combine import MEAN, Combine
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import DrawnEntries, Entries, Everything, Layers


@dataclass(frozen=True)
class Held:
    """The coordinator's record of a device.

    Attributes:
        number: round of its latest update.
        critical: m_i, shape (spec.size,).
        collaborated: delta_i at the critical entries, shape (critical.sum(),); None if the device keeps its
            own values there.
    """

    number: int
    critical: MaskArray
    collaborated: FlatArray | None


@dataclass(frozen=True)
class ServerState:
    """Coordinator state.

    Attributes:
        weights: bar, shape (spec.size,); normalisation layers keep their initial values.
        number: t of the present round.
        merged: True if `weights` is a bar, False if it is the initial model.
        ratios: ratio that each device's budget allows, an upper bound of its tau.
        held: record of every device that has sent an update.
        collaboration: overlaps of the last round's devices; None if they were not computed.
    """

    weights: FlatArray
    number: int = 0
    merged: bool = False
    ratios: dict[DeviceId, float] = field(default_factory=dict)
    held: dict[DeviceId, Held] = field(default_factory=dict)
    collaboration: Collaboration | None = None


@dataclass(frozen=True)
class ClientState:
    """Device state between its rounds.

    Attributes:
        weights: the whole model after local training, shape (spec.size,).
        critical: m_i, shape (spec.size,).
        number: round of both; 0 before the first training.
    """

    weights: FlatArray
    critical: MaskArray
    number: int = 0


@dataclass(frozen=True)
class Task:
    """Start of a device's local training.

    Attributes:
        number: t of this round.
        holds: round of the device's latest update at the coordinator; 0 if there is none.
        ratio: an upper bound of tau.
        patch: entries of the device's next model that it cannot know.
    """

    number: Number
    holds: Number
    ratio: Ratio
    patch: Patch


@dataclass(frozen=True)
class Update:
    """The critical entries, and the number of training samples (for `weighted`)."""

    patch: Patch
    num_samples: NumSamples


LOWEST_RATIO = 0.05
SHARED: tuple[Kind, ...] = ("weight", "bias")  # normalisation layers stay on the device (section 4.3)


def shared_entries(spec: ModelSpec) -> MaskArray:
    """Mark all entries except those of normalisation layers, bool, shape (spec.size,)."""
    return np.repeat([tensor.kind in SHARED for tensor in spec.tensors], [t.size for t in spec.tensors])


def combined(critical: MaskArray, collaborated: Floats, average: Floats) -> Floats:
    """Return delta_i at the entries of m_i, and bar elsewhere (eq. 11)."""
    return np.where(critical, collaborated, average)


@dataclass(frozen=True)
class _Received:
    """A device's update as arrays: m_i and the masked weights, shapes (spec.size,)."""

    device: DeviceId
    critical: MaskArray
    weights: FlatArray
    num_samples: int


@dataclass(frozen=True)
class FedPURIN(Method[ServerState, ClientState, Task, Update]):
    """The method FedPURIN, with its settings; the defaults are those that the paper recommends.

    Attributes:
        tau: share of each tensor that is critical.
        beta: last round with collaboration on critical entries; 0 means none. The default is half of
            run.rounds, rounded up, as in the paper. Raising the rounds of a run later does not change it.
        gradient: g of the score: the gradient of the last batch, or the change of the weights in local
            training.
        second_order: True adds the term (g * w)^2 / 2 to the score.
        all_zero: what happens to a tensor without a score above 1e-10: kept as in the authors' code, or
            omitted as in the paper's text.
        average: divisor of bar: all devices (eq. 10, where entries critical to few devices shrink), or the
            devices that sent the entry. The latter is not in the paper. On digits with an MLP it was 2 points
            better, and 6 points with 4 of 16 devices a round. On Fashion-MNIST with a normalised CNN it was
            no better.
        weighted: True weighs devices in bar by their training samples, as in the authors' code but not in eq.
            10. The paper's experiments do not differ, because all devices have 500 samples.
        personal: model that the device uses. `trained` is the whole model. `sparse` has 0 at entries that are
            not critical; its accuracy is the paper's "before aggregation". This does not change training. A
            second run with the same seed and the other value reports both, next to that of the combined model
            (`before`).
        downlink: what a device with a tau below `tau` is sent. `share` sends its share of bar only, with
            other entries in every round, and the device keeps its own values elsewhere. `whole` sends all of
            bar.

    In Fleetune's extension, a device's budget may lower its tau. Unlike the authors' code, gradients are not
    rounded to float16 before scoring. A threshold has a tolerance of 1e-12 for ties.
    """

    leak: ClassVar[str | None] = "a device chooses by its data which entries it sends, and the choice is sent"

    spec: ModelSpec
    tau: Annotated[float, Meta(gt=0, le=1)] = 0.5
    beta: Annotated[int, Meta(ge=0)] = EARLIER_BETA
    gradient: Literal["last-batch", "change"] = "last-batch"
    second_order: bool = False
    all_zero: Literal["keep", "omit"] = "keep"
    average: Literal["devices", "coverage"] = "devices"
    weighted: bool = False
    personal: Literal["trained", "sparse"] = "trained"
    downlink: Literal["share", "whole"] = "whole"

    state_type, device_state_type = ServerState, ClientState
    task_type, update_type = Task, Update
    not_combined: ClassVar[str] = (
        "it averages critical entries within groups that the updates themselves form"
    )
    diagnostics: ClassVar[tuple[Diagnostic, ...]] = COLLABORATION_DIAGNOSTICS

    @classmethod
    def defaults_of_run(cls, rounds: int) -> Mapping[str, Any]:
        """Return defaults for a new run: half of its rounds as beta, and a setting that differs from the
        paper's.
        """
        return {"beta": beta_of_run(rounds), "downlink": "share"}

    @property
    def weighs_by_samples(self) -> bool:
        return self.weighted

    def init_coordinator(self, weights: FlatArray) -> ServerState:
        return ServerState(weights)

    def admit(self, state: ServerState, report: DeviceReport) -> ServerState:
        return replace(state, ratios={**state.ratios, report.device: report.ratio})

    def init_device(self, weights: FlatArray) -> ClientState:
        return ClientState(weights, np.zeros(self.spec.size, dtype=bool))

    def plan(
        self, state: ServerState, round_: Round, key: Key
    ) -> tuple[ServerState, Mapping[DeviceId, Task]]:
        def task(device: DeviceId) -> Task:
            held = state.held.get(device)
            ratio, holds = state.ratios.get(device, 1.0), held.number if held else 0
            unknown = self._unknown_to(held, state, self._sent_of_bar(ratio, round_.number))
            return Task(round_.number, holds, ratio, unknown)

        return replace(state, number=round_.number), lazily(round_.participants, task)

    def _share_of_bar(self, ratio: float) -> float:
        """Return the share of bar to send to a device of this ratio.

        This share and the device's critical entries together make up its tau / `tau` of a model.
        """
        if ratio >= self.tau or self.downlink == "whole":
            return 1.0
        share = ratio / self.tau
        return share if self.tau == 1 else (share - ratio) / (1 - ratio)

    def _sent_of_bar(self, ratio: float, number: int) -> MaskArray:
        """Mark the entries of bar that a device of this ratio is sent, shape (spec.size,); both sides compute
        them.
        """
        share = self._share_of_bar(ratio)
        drawn = DrawnEntries.of_round(share, number, Key.of("downlink")) if share < 1 else Everything()
        return drawn.mask(self.spec)

    def _unknown_to(self, held: Held | None, state: ServerState, sent_of_bar: MaskArray) -> Patch:
        if not state.merged:
            return Patch(Layers(()), state.weights[:0])
        start, unknown = state.weights, shared_entries(self.spec) & sent_of_bar & (state.weights != 0)
        if held is not None and held.collaborated is not None:
            start, unknown = start.copy(), unknown | held.critical
            start[held.critical] = held.collaborated
        elif held is not None:
            unknown = unknown & ~held.critical
        return self._patch(start, unknown)

    def work(
        self, state: ClientState, task: Task, trainer: Trainer, budget: Budget, key: Key
    ) -> tuple[ClientState, Update]:
        start = self.combined_model(state, task)
        last_batch = self.gradient == "last-batch"
        fit = trainer.fit(start, FitPlan(keep_last_gradient=last_batch), key)
        gradient = fit.last_gradient if last_batch else fit.weights - start
        if gradient is None:  # without data, no step was taken and there is no gradient
            gradient = np.zeros_like(start)
        scores = perturbation(fit.weights, gradient, second_order=self.second_order)
        check_finite(scores, "fedpurin: the score |gradient * weight|")
        tau = min(self.tau, task.ratio, budget.ratio)
        critical = critical_entries(scores, tau, self.spec, SHARED, keep_all_zero=self.all_zero == "keep")
        update = Update(self._patch(fit.weights, critical), trainer.num_samples)
        return ClientState(fit.weights, critical, task.number), update

    def combined_model(self, state: ClientState, task: Task) -> FlatArray:
        """Return the next model (eq. 11) as the device assembles it, shape (spec.size,).

        If the coordinator holds the device's latest update, the model has the device's own critical entries
        and the patch. All other entries are 0, or the device's own weights where bar was not sent. Otherwise
        the rules at the top of this module apply.
        """
        if 0 < task.holds == state.number:
            bar = self._sent_of_bar(task.ratio, task.number)
            return task.patch.apply(np.where(bar, self._sparse(state), state.weights), self.spec)
        return combined(state.critical, state.weights, task.patch.apply(state.weights, self.spec))

    def _patch(self, weights: FlatArray, entries: MaskArray) -> Patch:
        return Patch(Entries(entries[: self.spec.num_parameters]), weights[entries])

    def aggregate(
        self, state: ServerState, updates: Iterable[tuple[DeviceId, Update]], combine: Combine = MEAN
    ) -> ServerState:
        received = [self._received(device, update) for device, update in updates]
        masks, models = [one.critical for one in received], [one.weights for one in received]
        held = {device: replace(earlier, collaborated=None) for device, earlier in state.held.items()}
        deltas, collaboration = collaborated_models(masks, models, state.number, self.beta)
        for one, delta in zip(received, deltas, strict=True):
            collaborated = None if delta is None else delta[one.critical]
            held[one.device] = Held(state.number, one.critical, collaborated)
        weights = combined(shared_entries(self.spec), self._bar(received), state.weights)
        return replace(state, weights=weights, merged=True, held=held, collaboration=collaboration)

    def diagnose_update(self, update: Update) -> Mapping[str, Figure]:
        return {"critical": update.patch.values.size / self.spec.num_parameters}

    def diagnose_round(self, state: ServerState) -> Mapping[str, Figure]:
        return collaboration_figures(state.collaboration)

    def _bar(self, received: Sequence[_Received]) -> FlatArray:
        shares = [one.num_samples if self.weighted else 1 for one in received]
        masks = [one.critical for one in received] if self.average == "coverage" else None
        return masked_mean([one.weights for one in received], shares, masks)

    def _received(self, device: DeviceId, update: Update) -> _Received:
        critical = update.patch.selection.mask(self.spec) & shared_entries(self.spec)
        sent = update.patch.apply(np.zeros(self.spec.size, np.float32), self.spec)
        return _Received(device, critical, np.where(critical, sent, np.float32(0)), update.num_samples)

    def personal_model(self, state: ClientState) -> FlatArray:
        return self._sparse(state) if self.personal == "sparse" and state.number else state.weights

    def _sparse(self, state: ClientState) -> FlatArray:
        return np.where(shared_entries(self.spec) & ~state.critical, np.float32(0), state.weights)

    def choices(self, report: DeviceReport) -> Sequence[Choice]:
        """Return the choices of tau, with the traffic of each; the lowest choice is for the slowest links.

        Downward traffic is at most every shared entry, or the device's share of them, because bar covers more
        than any one device's entries.
        """
        ratios = [ratio for ratio in (LOWEST_RATIO, *RATIOS) if ratio < self.tau] + [self.tau]
        return [Choice(ratio, self._cost(ratio)) for ratio in ratios]

    def _cost(self, ratio: float) -> Cost:
        sizes = [tensor.size for tensor in self.spec.tensors if tensor.kind in SHARED]
        up = sum(int(ratio * size) for size in sizes)
        down = up + round(self._share_of_bar(ratio) * (sum(sizes) - up))
        return Cost(
            bytes_down=estimate_bytes(down) + self._bitmap_bytes(down),
            bytes_up=estimate_bytes(up) + self._bitmap_bytes(up),
            bytes_vary=True,
            mask_bytes_up=self._bitmap_bytes(up),
        )

    def _bitmap_bytes(self, num_entries: int) -> int:
        return estimate_bitmap_bytes(num_entries, self.spec.num_parameters)
