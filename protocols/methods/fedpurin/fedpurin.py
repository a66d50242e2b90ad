"""FedPURIN (Xie, He, Shi): devices send the weights that matter most to their loss, nothing else.

Round t: a device trains its whole model, scores every entry by |gradient * weight|, marks the top tau of
each tensor as critical (m_i) and sends these. Devices with similar masks average their critical entries
(delta_i); the others come from the mean of all that was sent (bar). Normalisation layers stay on the device.

Out of the paper's order, a device's next model travels when it next takes part, not at once. Only what it
cannot know travels: nothing where bar is 0, and not its own critical entries where nobody collaborates with
it (always beyond t = beta). In their place the coordinator remembers m_i of every device (1 bit an entry on
disk), and of the last round's delta_i where there are collaborators.

The paper has every device in every round. For the others:
- bar and the overlaps are over the devices whose updates arrived in a round.
- Who was absent from the last round keeps its critical entries, like everybody beyond beta, and takes the
  newest bar elsewhere. (Keeping delta_i for it until it returns was 2 to 3 points worse on digits with 4 of
  16 devices a round, and costs the coordinator a model a device.)
- Whose latest update the coordinator does not have (a late joiner, a lost update, an abandoned round) does
  the same, but keeps its own weights where bar is 0, since it need not know what of bar was left out.
- What an update says of normalisation layers is left out.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from msgspec import Meta

from fleetune.protocols.finite import check_finite
from fleetune.protocols.method.choice import RATIOS, Budget, Choice, Cost, DeviceReport
from fleetune.protocols.method.critical_parameters import (
    COLLABORATION_DIAGNOSTICS,
    EARLIER_BETA,
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
from fleetune.protocols.methods.fedpurin.state import ClientState, Held, ServerState, Task, Update
from fleetune.protocols.model.spec import FlatArray, Kind, MaskArray, ModelSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.codec import estimate_bitmap_bytes, estimate_bytes
from fleetune.protocols.update.combine import MEAN, Combine
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import DrawnEntries, Entries, Everything, Layers

LOWEST_RATIO = 0.05
SHARED: tuple[Kind, ...] = ("weight", "bias")  # normalisation layers stay on the device (section 4.3)


def shared_entries(spec: ModelSpec) -> MaskArray:
    """All but normalisation layers, shape (spec.size,)."""
    return np.repeat([tensor.kind in SHARED for tensor in spec.tensors], [t.size for t in spec.tensors])


def combined(critical: MaskArray, collaborated: Floats, average: Floats) -> Floats:
    """delta_i where m_i, bar elsewhere (eq. 11)."""
    return np.where(critical, collaborated, average)


@dataclass(frozen=True)
class _Received:
    """An update as arrays: m_i and the masked weights, shapes (spec.size,)."""

    device: DeviceId
    critical: MaskArray
    weights: FlatArray
    num_samples: int


@dataclass(frozen=True)
class FedPURIN(Method[ServerState, ClientState, Task, Update]):
    """Settings; the defaults are the paper's recommended ones.

    Attributes:
        tau: share of each tensor that is critical.
        beta: the last round with collaboration on critical entries; 0: none. Left out it is half of
            run.rounds, rounded up, as in the paper; raising the rounds of a run later does not move it.
        gradient: g of the score: of the last batch, or the change of the weights in local training.
        second_order: add the term (g * w)^2 / 2 to the score.
        all_zero: a tensor without a score above 1e-10 is kept as by the authors' code, or omitted as by
            the paper's text.
        average: what bar divides by: all devices (eq. 10: what few hold critical shrinks) or those that
            sent the entry. Not in the paper. On digits with an MLP it was 2 points better, and 6 with 4 of
            16 devices a round; on Fashion-MNIST with a normalised CNN no better.
        weighted: bar weighs devices by their training samples (the authors' code; eq. 10 does not. The
            same in the paper's experiments, where all have 500).
        personal: the model the device uses. `trained`: whole. `sparse`: with 0 at what is not critical;
            its accuracy is the paper's "before aggregation". This changes no training: a second run with
            the same seed and the other value reports both, beside that of the combined model (`before`).
        downlink: a device whose tau is lower than `tau` is sent its share of bar only, other entries in
            every round, and keeps its own elsewhere (`share`); or all of bar (`whole`).

    A device's budget may lower its tau: Fleetune's extension. Unlike the authors' code, gradients are not
    rounded to float16 before scoring, and ties at a threshold are compared with a slack of 1e-12.
    """

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
    diagnostics: ClassVar[tuple[Diagnostic, ...]] = COLLABORATION_DIAGNOSTICS

    @classmethod
    def defaults_of_run(cls, rounds: int) -> Mapping[str, Any]:
        """Half of the run's rounds, and a setting that differs from the paper's."""
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
        """How much of bar a device of this ratio is sent: with its critical entries it is sent that share of
        a model that its tau is of `tau`.
        """
        if ratio >= self.tau or self.downlink == "whole":
            return 1.0
        share = ratio / self.tau
        return share if self.tau == 1 else (share - ratio) / (1 - ratio)

    def _sent_of_bar(self, ratio: float, number: int) -> MaskArray:
        """Which entries of bar a device of this ratio is sent, shape (spec.size,): both sides know."""
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
        if gradient is None:  # no data, no step
            gradient = np.zeros_like(start)
        scores = perturbation(fit.weights, gradient, second_order=self.second_order)
        check_finite(scores, "fedpurin: the score |gradient * weight|")
        tau = min(self.tau, task.ratio, budget.ratio)
        critical = critical_entries(scores, tau, self.spec, SHARED, keep_all_zero=self.all_zero == "keep")
        update = Update(self._patch(fit.weights, critical), trainer.num_samples)
        return ClientState(fit.weights, critical, task.number), update

    def combined_model(self, state: ClientState, task: Task) -> FlatArray:
        """The next model (eq. 11) as the device puts it together, shape (spec.size,).

        If the coordinator holds its latest update: its own critical entries, the patch over them, 0
        elsewhere, or its own weights where bar was not sent. Otherwise see the rules at the top.
        """
        if 0 < task.holds == state.number:
            told = self._sent_of_bar(task.ratio, task.number)
            return task.patch.apply(np.where(told, self._sparse(state), state.weights), self.spec)
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
        """Values of tau, one below all others for the thinnest links: down, twice tau of the model travels.
        Down, at most every shared entry or the device's share of them: bar covers more than any one device.
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
