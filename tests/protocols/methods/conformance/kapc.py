"""KAPC's and BLS's steps: the product's functions in the vectors' shapes."""

from collections.abc import Callable

import numpy as np

from fleetune.edge_agent.training.descent import Descent
from fleetune.protocols.method.trainer import FitPlan, Pull
from fleetune.protocols.methods.kapc import bls, relationship_cube
from fleetune.protocols.model.spec import ModelSpec, TensorSpec
from fleetune.protocols.settings.device import TrainingSection
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Layers


def coaching_grad(R, W, lam, beta):
    return relationship_cube.coaching_gradient(R, [relationship_cube.gram(w) for w in W], lam, beta)


def step_R(R, W, lam, beta, eta, safe=False):
    grams = [relationship_cube.gram(w) for w in W]
    return relationship_cube.descend(R, grams, coaching=lam, equal_sharing=beta, rate=eta, safe=safe)


def server_models(R, W):
    targets = [relationship_cube.server_model(rows, W) for rows in R]
    return [np.stack(layer) for layer in zip(*targets, strict=True)]


def client_step(w, grad_f, s, lam, eta):
    weights, gradient = w.copy(), grad_f.copy()
    pull = None if s is None else Pull(s, lam)
    Descent(weights, gradient, w.size, TrainingSection(learning_rate=eta), FitPlan(pull=pull)).step()
    return weights


def stale_fill(server_copy, upload, Om):
    tensors = [TensorSpec(f"{i}", copy.shape, "weight", f"{i}", ((),)) for i, copy in enumerate(server_copy)]
    spec = ModelSpec("row", tuple(tensors), (), (1,), 2)
    sent = Patch.of(np.concatenate(upload), Layers(tuple(spec.layers)[:Om]), spec)
    filled = sent.apply(np.concatenate(server_copy), spec)
    return [filled[where] for where in spec.layers.values()]


def search_table(flags, L, prev, first, mode="largest"):
    return bls.search(prev, L, lambda number: bool(flags[number - 1]), first=first, mode=mode)


STEPS: dict[str, Callable] = {
    "kapc:bounds": lambda w_layers, s_layers: bls.bounds(weights=w_layers, targets=s_layers),
    "kapc:client_step": client_step,
    "kapc:coaching_grad": coaching_grad,
    "kapc:criterion": lambda Om, B, T, Bt, Tt, d, n, c: bls.criterion(Om, (B, T), (Bt, Tt), d, n, c),
    "kapc:normalise": lambda R: relationship_cube.normalise(cube=R),
    "kapc:project_simplex": lambda R: relationship_cube.project_simplex(cube=R),
    "kapc:search_table": search_table,
    "kapc:self_filter": lambda R_i, i, mu: bls.self_taught(rows=R_i, place=i, threshold=mu),
    "kapc:server_models": server_models,
    "kapc:slice_participants": lambda R, P: relationship_cube.slice_participants(cube=R, places=P),
    "kapc:stale_fill": stale_fill,
    "kapc:step_R": step_R,
    "kapc:write_back": lambda R, P, Rp: relationship_cube.write_back(cube=R, places=P, part=Rp),
}
