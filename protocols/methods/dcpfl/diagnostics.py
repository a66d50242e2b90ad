"""Diagnostics of DC-PFL: groups and trials, waiting layers, layers' discrepancies, and shares sent."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.method.diagnostics import Diagnostic, Figure
from fleetune.protocols.methods.dcpfl.discrepancy import PairMeans
from fleetune.protocols.methods.dcpfl.groups import Grouping
from fleetune.protocols.methods.dcpfl.splitting import ServerState, Update

_LAYERS = "mean over devices"

DIAGNOSTICS = (
    Diagnostic("sent", "sent up", "parameters that a device sent, of all; 0 in a trial", "share", "update"),
    Diagnostic(
        "trial_gain",
        "gain of a trial",
        "training loss of the old group's model minus that of the new group's; above 0 the new group stays",
        "number",
        "update",
    ),
    Diagnostic("groups", "groups", "groups of devices, more with each trial that is won", "count", "round"),
    Diagnostic("gamma", "gamma", "normalised distance up to which devices share a group", "number", "round"),
    Diagnostic("trials_won", "trials won", "splits that stayed after their trial", "count", "round"),
    Diagnostic("trials_lost", "trials lost", "splits that were undone after their trial", "count", "round"),
    Diagnostic(
        "pairs_apart",
        "discrepancy of pairs",
        "D_ij over its mean over all pairs: groups whose members are alike lie below 1",
        "number",
        "round",
        by="kinds of pair",
    ),
    Diagnostic(
        "interval",
        "interval",
        f"rounds from one upload of a layer to the next (tau_gl), {_LAYERS}; calm layers wait longer",
        "number",
        "round",
        by="layers",
    ),
    Diagnostic(
        "layer_apart",
        "layer discrepancy",
        f"D_gl over D_g when the intervals were last set, {_LAYERS}; the largest do not wait",
        "number",
        "round",
        by="layers",
    ),
)


def diagnose_update(update: Update, num_parameters: int) -> Mapping[str, Figure]:
    """Return the diagnostics of a device's update."""
    found: dict[str, Figure] = {"sent": update.patch.values.size / num_parameters}
    if update.trial is not None:
        old, new = update.trial
        found["trial_gain"] = old - new
    return found


def diagnose_round(state: ServerState, layers: tuple[str, ...]) -> Mapping[str, Figure]:
    """Return the diagnostics of the state after a round, for layers of these names."""
    grouping = state.grouping
    sizes = np.array([len(grouping.members(place)) for place in range(len(grouping.groups))])
    return {
        "groups": len(grouping.groups),
        "gamma": grouping.gamma,
        "trials_won": state.won,
        "trials_lost": state.lost,
        "pairs_apart": _pairs_apart(state.pairs, grouping),
        **_of_layers("interval", layers, sizes, [group.every for group in grouping.groups]),
        **_of_layers("layer_apart", layers, sizes, [_relative(group.apart) for group in grouping.groups]),
    }


def _relative(apart: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return D_gl over D_g; empty if nothing was measured or all members are equal."""
    return apart / apart.mean() if apart.size and apart.mean() > 0 else np.zeros(0)


def _of_layers(
    name: str, layers: tuple[str, ...], sizes: NDArray[np.int64], rows: list[NDArray[np.generic]]
) -> Mapping[str, Figure]:
    """Return the mean over groups of each layer's figures, weighted by members; groups without figures are
    skipped.
    """
    counted = [place for place, row in enumerate(rows) if row.size and sizes[place]]
    if not counted:
        return {}
    mean = np.average([rows[place] for place in counted], axis=0, weights=sizes[counted])
    return {name: dict(zip(layers, mean.tolist(), strict=True))}


def _pairs_apart(pairs: PairMeans, grouping: Grouping) -> Mapping[str, float]:
    """Return the mean discrepancies of compared pairs; kinds without pairs are omitted."""
    met = np.triu(pairs.counts > 0, 1)
    means = pairs.sums / np.maximum(pairs.counts, 1)
    usual = means[met].mean() if met.any() else 0.0
    if not usual > 0:
        return {}
    places = np.array([-1 if (at := grouping.place_of(one)) is None else at for one in pairs.devices])
    alike = places[:, np.newaxis] == places
    kinds = {"in one group": met & alike, "in two groups": met & ~alike}
    return {kind: float(means[these].mean() / usual) for kind, these in kinds.items() if these.any()}
