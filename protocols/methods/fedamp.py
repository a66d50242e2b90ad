"""FedAMP (Huang et al., AAAI 2021): each personal model is pulled towards a mix of similar ones.

One round (Algorithm 1), with the personal models w_j:

1. The coordinator mixes u_i = (1 - sum_j xi_ij) * w_i + sum_j xi_ij * w_j for device i, where j runs over the
    others, xi_ij = alpha * A'(||w_i - w_j||^2) and A(x) = 1 - exp(-x / sigma) (eq. 4-5).
2. The device trains from its own w_i on f_i(w) + lambda / (2 alpha) * ||w - u_i||^2 and sends w_i back (eq.
    6).

`form = "cosine"` is the paper's variant for deep networks (HeurFedAMP, eq. 9). xi_ij is then proportional to
exp(sigma * cos(w_i, w_j)), and w_i itself has a fixed share.

Differs from the paper: not all devices take part in every round. w_j is the last model that j sent, and a
device without one has the initial weights and gives nothing to others. The paper needs an alpha small enough
that shares stay below 1. Here the others' shares are scaled down if their sum exceeds 1. Alpha stays
constant; the paper lowers it over the rounds.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from fleetune.protocols.errors import SettingError
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.method.targets import PersonalTargets, Update
from fleetune.protocols.method.trainer import Pull
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.update.combine import MEAN, Combine

Shares = NDArray[np.float64]


@dataclass(frozen=True)
class ServerState:
    """The initial weights of all devices, shape (spec.size,), and the latest personal models."""

    initial: FlatArray
    latest: dict[DeviceId, FlatArray] = field(default_factory=dict)


def attention(own: FlatArray, others: Sequence[FlatArray], alpha: float, sigma: float) -> Shares:
    """Return xi_ij = alpha / sigma * exp(-||w_i - w_j||^2 / sigma) of each other device, shape
    (len(others),).
    """
    squared = [_squared_distance(own, other) for other in others]
    shares: Shares = alpha / sigma * np.exp(-np.array(squared) / sigma)
    return shares / max(1.0, float(shares.sum()))


def cosine_attention(own: FlatArray, others: Sequence[FlatArray], self_share: float, sigma: float) -> Shares:
    """Return xi_ij = (1 - xi_ii) * softmax_j(sigma * cos(w_i, w_j)), shape (len(others),)."""
    cosines = [_cosine(own, other) for other in others]
    scores: Shares = np.exp(sigma * (np.array(cosines) - max(cosines, default=0.0)))
    return (1 - self_share) * scores / max(1.0, float(scores.sum()))


def _squared_distance(own: FlatArray, other: FlatArray) -> float:
    with np.errstate(over="ignore"):
        squared = float(np.sum(np.square(own - other, dtype=np.float64)))
    return squared if math.isfinite(squared) else _squared_distance(_wide(own), _wide(other))


def _cosine(own: FlatArray, other: FlatArray) -> float:
    """Return the cosine between two vectors; 0 if either is all zero."""
    with np.errstate(over="ignore", invalid="ignore"):
        norm, product = float(np.linalg.norm(own) * np.linalg.norm(other)), float(own @ other)
    if math.isfinite(norm) and math.isfinite(product):
        return product / norm if norm else 0.0
    return _cosine(_wide(own), _wide(other))


def _wide(weights: FlatArray) -> FlatArray:
    """Return the vector in float64, where the squares of all float32 numbers are finite."""
    return weights.astype(np.float64)


def message(own: FlatArray, others: Sequence[FlatArray], shares: Shares) -> FlatArray:
    """Return the mixture u_i, shape (spec.size,)."""
    mixed = (1 - shares.sum()) * own.astype(np.float64)
    for other, share in zip(others, shares, strict=True):
        mixed += share * other
    return mixed.astype(own.dtype)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class FedAMP(PersonalTargets[ServerState]):
    """The method FedAMP, with its settings.

    Attributes:
        form: similarity of models: by `distance` (eq. 4), or by `cosine` (the paper's HeurFedAMP).
        alpha: the alpha of eq. 4; alpha / sigma is the largest share of another device.
        sigma: squared distance at which a share has fallen to 1/e; with `cosine`, the sharpness of the
            shares.
        pull: lambda; devices are pulled with strength lambda / (2 alpha).
        self_share: xi_ii of `cosine`, share of a device in its own mixture.
    """

    leak: ClassVar[str | None] = (
        "devices' models are mixed by their similarity, so one step changes the mixture without a bound"
    )

    form: Literal["distance", "cosine"] = "distance"
    alpha: Annotated[float, Meta(gt=0)] = 1.0
    sigma: Annotated[float, Meta(gt=0)] = 10.0
    pull: Annotated[float, Meta(ge=0)] = 1.0
    self_share: Annotated[float, Meta(ge=0, le=1)] = 0.5

    state_type = ServerState
    not_combined: ClassVar[str] = "each device gets a mixture of its own"

    def __post_init__(self) -> None:
        """Check the settings. Raises SettingError if a share or the pull leaves the range of numbers."""
        if not math.isfinite(self.alpha / self.sigma) or not math.isfinite(self.pull / (2 * self.alpha)):
            raise SettingError(
                f"method.alpha: {self.alpha:g} with method.sigma {self.sigma:g} and method.pull {self.pull:g}"
                " makes alpha / sigma or pull / (2 alpha) infinite; choose values nearer to 1"
            )

    def init_coordinator(self, weights: FlatArray) -> ServerState:
        return ServerState(weights)

    def targets(self, state: ServerState) -> Callable[[DeviceId], FlatArray]:
        """Return a function that gives each device's target u_i, the mixture of the personal models."""

        def mixed(device: DeviceId) -> FlatArray:
            own = state.latest.get(device, state.initial)
            others = [state.latest[other] for other in sorted(state.latest) if other != device]
            return message(own, others, self._shares(own, others))

        return mixed

    def _shares(self, own: FlatArray, others: Sequence[FlatArray]) -> Shares:
        if self.form == "cosine":
            return cosine_attention(own, others, self.self_share, self.sigma)
        return attention(own, others, self.alpha, self.sigma)

    def pull_towards(self, target: FlatArray) -> Pull:
        return Pull(target, self.pull / (2 * self.alpha))

    def aggregate(
        self, state: ServerState, updates: Iterable[tuple[DeviceId, Update]], combine: Combine = MEAN
    ) -> ServerState:
        latest = {device: update.patch.apply(state.initial, self.spec) for device, update in updates}
        return replace(state, latest={**state.latest, **latest})

    def shared_model(self, state: ServerState) -> FlatArray:
        """Return the plain mean of the received models, for new devices; no device trains on it."""
        models = [state.latest[device] for device in sorted(state.latest)]
        if not models:
            return state.initial
        return message(models[0], models[1:], np.full(len(models) - 1, 1 / len(models)))
