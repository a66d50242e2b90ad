"""Diagnostics of KAPC and BLS: shares r_ii in the own target, and numbers of layers sent each way."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.method.diagnostics import Diagnostic, Figure


@dataclass(frozen=True)
class Coached:
    """The targets sent to the last round's participants; rows are in the order of participants.

    Attributes:
        own: share of each participant in its own target (r_ii), float64, shape (participants, L).
        reach: number of layers, from the first, that each one exchanges, int64, shape (participants,).
        sent: True at layers whose target was sent down, bool, shape (participants, L).
    """

    own: NDArray[np.float64]
    reach: NDArray[np.int64]
    sent: NDArray[np.bool_]


_OWN = "the share r_ii that a device has in its own target"


def _share(
    name: str, title: str, about: str, *, of: Literal["update", "round"] = "round", by: str | None = None
) -> Diagnostic:
    return Diagnostic(name, title, about, unit="share", of=of, by=by)


DIAGNOSTICS = (
    Diagnostic("layers_up", "layers up", "layers that a device sent, from the first on", "count", "update"),
    _share("entries_up", "sent up", "of the entries of all layers, those that a device sent", of="update"),
    _share(
        "own_share",
        "own share, mean",
        f"{_OWN}, mean over the participants that exchange the layer; 1/N at the start, grows as they differ",
        by="layers",
    ),
    _share("own_share_largest", "own share, largest", f"{_OWN}, the largest among them", by="layers"),
    Diagnostic(
        "layers_down", "layers down", "layers sent to a device, mean over participants", "number", "round"
    ),
    _share("entries_down", "sent down", "of the entries of all layers, those sent to a device, mean"),
)

BLS_DIAGNOSTICS = (
    *DIAGNOSTICS,
    _share(
        "self_taught",
        "self-taught",
        "of the layers that participants exchange, those whose own share r_ii is above mu: not sent down",
    ),
)


def diagnose_update(uploaded: int, sizes: Sequence[int]) -> Mapping[str, Figure]:
    """Return the diagnostics of an update with the first `uploaded` layers, of these sizes in entries."""
    return {"layers_up": uploaded, "entries_up": sum(sizes[:uploaded]) / max(1, sum(sizes))}


def diagnose_round(coached: Coached, names: Sequence[str], sizes: Sequence[int]) -> Mapping[str, Figure]:
    """Return the diagnostics of a round, for layers of these names and sizes.

    A layer that no device exchanges is left out.
    """
    exchanged = _exchanged(coached)
    own = {name: coached.own[exchanged[:, layer], layer] for layer, name in enumerate(names)}
    return {
        "own_share": {name: float(shares.mean()) for name, shares in own.items() if shares.size},
        "own_share_largest": {name: float(shares.max()) for name, shares in own.items() if shares.size},
        "layers_down": float(coached.sent.sum(axis=1).mean()),
        "entries_down": float((coached.sent @ np.array(sizes)).mean() / max(1, sum(sizes))),
    }


def diagnose_self_taught(coached: Coached, threshold: float) -> Mapping[str, Figure]:
    """Return the share of (device, layer) pairs with an r_ii above `threshold`, BLS's mu."""
    return {"self_taught": float((coached.own > threshold)[_exchanged(coached)].mean())}


def _exchanged(coached: Coached) -> NDArray[np.bool_]:
    """Mark the layers that each participant exchanges, shape (participants, L)."""
    places: NDArray[np.bool_] = np.arange(coached.own.shape[1]) < coached.reach[:, np.newaxis]
    return places
