"""LotteryFL (Li et al., SEC 2021; arXiv 2008.03371): each device finds and trains its own lottery ticket.

One round (algorithm 1):

1. A device gets its ticket's entries of the shared model.
2. It prunes if more than `target` of its weights are left and the received model is right on more than
    `threshold` of its own samples. Pruning removes the `rate` smallest weights of each layer and resets the
    others to the initial weights.
3. It trains the ticket and sends it.
4. The coordinator averages each entry over the tickets that hold it.

Biases and normalisation layers are always in the ticket. `protocols.method.submodels` describes absent
devices.

Differs from the authors' code: the accuracy is that of the validation part, or of the training part without
one; the code uses the test split. The code averages without sample counts, as its devices hold equally many
samples. A ticket only shrinks: it is the device's stored ticket without the entries that the coordinator did
not send.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from msgspec import Meta

from fleetune.protocols.method.averaging import Update
from fleetune.protocols.method.choice import EVALUATION_EPOCHS, Budget, Choice, Cost, DeviceReport
from fleetune.protocols.method.submodels import PartAveraging, Task, cut
from fleetune.protocols.method.trainer import FitPlan, Trainer
from fleetune.protocols.model.spec import FlatArray, MaskArray, ModelSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.codec import estimate_bitmap_bytes, estimate_bytes
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Entries, Everything


@dataclass(frozen=True)
class ClientState:
    """The device's model theta_k, the initial model theta_0, and the ticket m_k; shapes (spec.size,)."""

    weights: FlatArray
    initial: FlatArray
    ticket: MaskArray


def prune(ticket: MaskArray, weights: FlatArray, spec: ModelSpec, rate: float) -> MaskArray:
    """Return `ticket` without the share `rate` of smallest |weights| in each layer, rounded down.

    Of equal weights, the first are removed.
    """
    pruned = ticket.copy()
    for tensor in spec.tensors:
        if tensor.kind == "weight":
            where = spec.slices[tensor.name]
            left = where.start + np.flatnonzero(ticket[where])
            order = np.argsort(np.abs(weights[left]), kind="stable")
            pruned[left[order[: _num_pruned(left.size, rate)]]] = False
    return pruned


def _num_pruned(num_left: int, rate: float) -> int:
    return int(rate * num_left + 1e-9)


def share_left(ticket: MaskArray, spec: ModelSpec) -> float:
    """Return the share of the layers' weights that is in the ticket."""
    weights = [ticket[spec.slices[tensor.name]] for tensor in spec.tensors if tensor.kind == "weight"]
    return float(np.concatenate(weights).mean())


@dataclass(frozen=True)
class LotteryFL(PartAveraging[ClientState]):
    """The method LotteryFL, with its settings.

    Attributes:
        threshold: acc_threshold, accuracy above which a device prunes. The authors' repository has 0.5 for
            MNIST and EMNIST, 0.1 for CIFAR-10.
        rate: r_p, share of the remaining weights that one pruning removes.
        target: r_target, share of weights at or below which pruning stops. The authors' repository has 0.5
            for CIFAR-10, 0.1 for MNIST and EMNIST.
    """

    leak: ClassVar[str | None] = "a device prunes by its accuracy and its data, and sends what is left"

    threshold: Annotated[float, Meta(ge=0, le=1)] = 0.5
    rate: Annotated[float, Meta(ge=0, lt=1)] = 0.2
    target: Annotated[float, Meta(ge=0, le=1)] = 0.5

    tasks = frozenset({"classification"})  # the accuracy decides when a ticket is pruned
    device_state_type = ClientState
    starts_from_task = False  # a newly pruned ticket starts from the initial weights

    def init_device(self, weights: FlatArray) -> ClientState:
        return ClientState(weights, weights, Everything().mask(self.spec))

    def work(
        self, state: ClientState, task: Task, trainer: Trainer, budget: Budget, key: Key
    ) -> tuple[ClientState, Update]:
        ticket = state.ticket & task.patch.selection.mask(self.spec)
        start = cut(task.patch.apply(state.weights, self.spec), ticket, self.spec)
        if share_left(ticket, self.spec) > self.target and self._is_good(start, trainer):
            ticket = prune(ticket, start, self.spec, self.rate)
            start = np.where(ticket, state.initial, cut(start, ticket, self.spec))
        fit = trainer.fit(start, FitPlan(trainable=ticket), key)
        sent = Patch.of(fit.weights, Entries(ticket[: self.spec.num_parameters]), self.spec)
        return ClientState(fit.weights, state.initial, ticket), Update(sent, trainer.num_samples)

    def choices(self, report: DeviceReport) -> Sequence[Choice]:
        """Return the choice with the largest traffic, because each device finds its own ticket.

        The first rounds send everything; later rounds send less, with a mask, whose largest size counts. The
        accuracy may need all training samples.
        """
        counts = self._counts()
        masks = [estimate_bitmap_bytes(count, self.spec.num_parameters) for count in counts]
        most = max(estimate_bytes(count) + mask for count, mask in zip(counts, masks, strict=True))
        return [Choice(1.0, Cost(most, most, extra_epochs=EVALUATION_EPOCHS, mask_bytes_up=max(masks)))]

    def _counts(self) -> list[int]:
        """Return the number of parameters in the ticket at first, and after each pruning."""
        left = [tensor.size for tensor in self.spec.tensors if tensor.kind == "weight"]
        prunable, counts = sum(left), [self.spec.num_parameters]
        while sum(left) > self.target * prunable:
            fewer = [size - _num_pruned(size, self.rate) for size in left]
            if fewer == left:
                break
            left = fewer
            counts.append(self.spec.num_parameters - prunable + sum(left))
        return counts

    def _is_good(self, weights: FlatArray, trainer: Trainer) -> bool:
        accuracy = trainer.accuracy(weights, "validation")
        if accuracy is None:
            accuracy = trainer.accuracy(weights, "train")
        return accuracy is not None and accuracy > self.threshold
