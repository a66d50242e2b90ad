"""Six attacks: two change the training data of hostile devices, four change their updates.

- `random`: each value is drawn from a normal distribution of deviation 1.
- `sign-flip`: the step from the shared model, in the opposite direction.
- `scaled-step`: -10 times the step.
- `a-little`: all hostile devices send the mean of the honest updates minus 1.5 standard deviations, entry by
  entry (Baruch et al., NeurIPS 2019, with their z for MNIST). They know all honest updates.
- `label-flip`: class c becomes 9 - c.
- `backdoor`: half of the samples get a white square and class 0.

Forged updates stand behind the product's own checks: one that the norm bound would refuse does not count.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fleetune.coordinator.extensions.extension import Extension, RoundUpdates, RunContext
from fleetune.coordinator.extensions.update_norms import UpdateNorms, sizes_of
from fleetune.edge_agent.datasets.dataset import Dataset
from fleetune.protocols.method.method import Method
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.wire.payloads import Reply

SCALE, DEVIATIONS = 10.0, 1.5
TARGET, SQUARE = 0, 4  # of the backdoor: a class, and the side of a square in pixels
Rows = NDArray[np.intp]


def hostile_devices(count: int, share: float, seed: int) -> list[int]:
    """Return the numbers of the hostile devices, ascending."""
    return [int(one) for one in Key.of("hostile", seed).sample(round(share * count), count)]


def stamped(x: NDArray[Any]) -> NDArray[Any]:
    """Return images with the backdoor's square in a corner."""
    x = x.copy()
    x[..., -SQUARE:, -SQUARE:] = np.iinfo(x.dtype).max if x.dtype.kind == "u" else 1
    return x


def poisoned(dataset: Dataset, rows: Rows, attack: str, seed: int) -> Dataset:
    """Return the samples after hostile devices changed these rows, their training samples."""
    x, y = dataset.x.copy(), dataset.y.copy()
    if attack == "label-flip":
        y[rows] = int(y.max()) - y[rows]
    else:
        half = rows[Key.of("backdoor", seed).sample(rows.size // 2, rows.size)]
        x[half], y[half] = stamped(x[half]), TARGET
    return replace(dataset, x=x, y=y)


@dataclass(frozen=True)
class Step:
    """One hostile update: the shared model and the device's honest values at the sent entries."""

    base: NDArray[np.float32]
    values: NDArray[np.float32]
    key: Key


FORGED: Mapping[str, Callable[[Step], NDArray[Any]]] = {
    "random": lambda step: step.key.normal(step.values.size),
    "sign-flip": lambda step: 2 * step.base - step.values,
    "scaled-step": lambda step: step.base - SCALE * (step.values - step.base),
}


class Attack(Extension):
    """Replaces the updates of hostile devices before any other extension weighs them.

    Attributes:
        hostile: names of the hostile devices.
        attack: name of the attack.
    """

    hostile: frozenset[str] = frozenset()
    attack: str = ""

    def __init__(self, method: Method[Any, Any, Any, Any], norms: UpdateNorms, limit: float) -> None:
        self._method, self._norms, self._limit = method, norms, limit

    @classmethod
    def of_run(cls, run: RunContext) -> Self | None:
        acts = cls.attack in FORGED or cls.attack == "a-little"
        return cls(run.method, run.norms, run.settings.round.norm_bound) if acts else None

    def weigh(self, replies: Iterator[Reply[Any]], round_: RoundUpdates) -> Iterator[Reply[Any]]:
        base = self._method.shared_model(round_.planned)
        agreed = self._a_little(round_) if self.attack == "a-little" else None
        for reply in replies:
            update: Any = reply.update
            if reply.device in self.hostile and update is not None:
                update = self._forged(update, base, agreed, Key.of("forged", round_.number, reply.device))
            yield replace(reply, update=update)

    def _forged(self, update: Any, base: NDArray[np.float32], agreed: Any, key: Key) -> Any:
        spec, patch = self._method.spec, update.patch
        mask = patch.selection.mask(spec)
        step = Step(base[mask], patch.values, key)
        values = FORGED[self.attack](step) if agreed is None else agreed[mask]
        forged = replace(update, patch=Patch(patch.selection, values.astype(np.float32)))
        if self._norms.ratio(sizes_of(forged), []).times > self._limit:  # the norm bound refuses it
            return replace(update, patch=Patch(patch.selection, base[mask]))
        return forged

    def _a_little(self, round_: RoundUpdates) -> NDArray[np.float32]:
        """Return the agreed values, shape (spec.size,); the shared model's where none was sent."""
        base, spec = self._method.shared_model(round_.planned).copy(), self._method.spec
        honest = [device for device in round_.devices if device not in self.hostile]
        sent = np.full((len(honest), spec.size), np.nan, np.float32)
        for row, device in zip(sent, honest, strict=True):
            update: Any = round_.reply_of(device).update
            patch = update.patch
            row[patch.selection.mask(spec)] = patch.values
        known = ~np.isnan(sent).all(axis=0)
        mean, deviation = np.nanmean(sent[:, known], axis=0), np.nanstd(sent[:, known], axis=0)
        base[known] = mean - DEVIATIONS * deviation
        return base
