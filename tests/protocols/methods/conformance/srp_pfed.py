"""SRP-pFed's steps: the product's functions in the vectors' shapes."""

from collections.abc import Callable

import numpy as np

from fleetune.protocols.methods import srp_pfed
from fleetune.protocols.model.spec import ModelSpec, TensorSpec
from fleetune.protocols.update.combine import CoveredMean
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Entries


def sample_rates(pi, u):
    drawn = srp_pfed.draw(np.asarray(pi), np.asarray(u))
    return [drawn, list(srp_pfed.distinct(drawn))]


def aggregate(w_prev, uploads, masks, n, mode="covered"):
    tensor = TensorSpec("w", w_prev.shape, "weight", "w", ((),))
    mean = CoveredMean(ModelSpec("flat", (tensor,), (), (1,), 2))
    for upload, mask, weight in zip(uploads, np.asarray(masks, dtype=bool), n, strict=True):
        mean.add(Patch(Entries(mask), upload[mask]), weight)
    return srp_pfed.merge(w_prev, mean, float(np.sum(n)), mode)


def choose(losses):
    return srp_pfed.choose(losses)


def fuse(w_global, w_local, m):
    return srp_pfed.fuse(m == 1, w_global, w_local)


def increment(losses, reduce="mean"):
    return srp_pfed.increment(losses, reduce)


def shared_mask(w, p):
    return srp_pfed.shared_mask(w, p)


def probabilities(h):
    return srp_pfed.probabilities(h)


def update_h(h, selected, b, lam=0.9):
    return srp_pfed.reinforce(h, selected, b, lam)


STEPS: dict[str, Callable] = {
    "srp_pfed:aggregate": aggregate,
    "srp_pfed:choose": choose,
    "srp_pfed:fuse": fuse,
    "srp_pfed:increment": increment,
    "srp_pfed:probabilities": probabilities,
    "srp_pfed:sample_rates": sample_rates,
    "srp_pfed:shared_mask": shared_mask,
    "srp_pfed:update_h": update_h,
}
