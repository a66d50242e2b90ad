"""DC-PFL's steps: the product's functions in the vectors' shapes."""

from collections.abc import Callable

import numpy as np

from fleetune.protocols.method.averaging import Update, covered_average
from fleetune.protocols.methods.dcpfl import discrepancy
from fleetune.protocols.methods.dcpfl.splitting import radius, rapid_decrease_end, smooth
from fleetune.protocols.model.spec import ModelSpec, TensorSpec
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Layers


def spec_of(layers) -> ModelSpec:
    tensors = [
        TensorSpec(f"l{i}", layer.shape, "weight", f"l{i}", ((),) * layer.ndim)
        for i, layer in enumerate(layers)
    ]
    return ModelSpec("layers", tuple(tensors), (), (1,), 2)


def flat(layers):
    return np.concatenate([np.ravel(layer) for layer in layers])


def aggregate_group(client_layers, is_due, n):
    spec = spec_of(client_layers[0])
    due = Layers(tuple(name for name, is_sent in zip(spec.layers, is_due, strict=True) if is_sent))
    models = [flat(layers) for layers in client_layers]
    updates = [(str(i), Update(Patch.of(model, due, spec), n[i])) for i, model in enumerate(models)]
    group = covered_average(np.zeros(spec.size), updates, spec)
    taken = [Patch.of(group, due, spec).apply(model, spec) for model in models]
    return [[values for _, values in spec.views(model)] for model in taken]


def average_discrepancy(Ds):
    devices, means = [str(i) for i in range(len(Ds[0]))], discrepancy.PairMeans()
    for matrix in Ds:
        means = means.add(devices, matrix, len(Ds))
    return means.average()


def layer_discrepancy(client_layers, group_layers):
    copies = list(zip(*client_layers, strict=True))
    return list(discrepancy.layer_discrepancy(copies, group_layers))


def groups_at(D, gamma_norm):
    labels, height = discrepancy.groups_at(D, gamma_norm)
    return [labels.tolist(), height]


def next_gamma(D, current, gamma, lam=0.2):
    gamma, labels = discrepancy.next_gamma(D, current, gamma, lam)
    return [gamma, labels.tolist()]


def rdp_end(r, t_obv=3):
    found = rapid_decrease_end(r, t_obv)
    return found and list(found)


STEPS: dict[str, Callable] = {
    "dcpfl:accept_split": lambda old_losses, new_losses: discrepancy.better(new_losses, old_losses),
    "dcpfl:aggregate_group": aggregate_group,
    "dcpfl:average_discrepancy": average_discrepancy,
    "dcpfl:discrepancy": discrepancy.discrepancy,
    "dcpfl:due": lambda t, iv: discrepancy.due(t, iv).tolist(),
    "dcpfl:groups_at": groups_at,
    "dcpfl:intervals": lambda Dgl, Dg, alpha=3, tau=1: discrepancy.intervals(Dgl, Dg, alpha, tau).tolist(),
    "dcpfl:layer_discrepancy": layer_discrepancy,
    "dcpfl:next_gamma": next_gamma,
    "dcpfl:radius": lambda lw, s=5: radius(lw, s),
    "dcpfl:rdp_end": rdp_end,
    "dcpfl:scale": discrepancy.scale,
    "dcpfl:smooth": lambda loss, s=5: smooth(loss, s),
}
