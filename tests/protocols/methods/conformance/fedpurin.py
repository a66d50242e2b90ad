"""FedPURIN's steps: the product's functions in the vectors' shapes, and its Table 3's count of bytes."""

import numpy as np

from fleetune.protocols.method.critical_parameters import (
    collaborators,
    critical_mask,
    masked_mean,
    mean_and_largest,
    overlap_ratios,
    perturbation,
)
from fleetune.protocols.methods.fedpurin import combined


def metric(g, theta, hessian=False):
    return perturbation(theta, g, second_order=hessian)


def mask(c, tau, zero_policy="keep"):
    return critical_mask(c, tau, keep_all_zero=zero_policy != "omit")


def overlap(masks):
    ratios = overlap_ratios([m.astype(bool) for m in masks])
    return [ratios, *mean_and_largest(ratios)]


def aggregate(thetas, masks, C, n=None):
    masks = [m.astype(bool) for m in masks]
    models = [np.where(m, theta, 0.0) for m, theta in zip(masks, thetas, strict=True)]
    bar = masked_mean(models, None if n is None else list(n))
    delta = [masked_mean([models[i], *(models[j] for j in others)]) for i, others in enumerate(C)]
    following = [combined(m, d, bar) for m, d in zip(masks, delta, strict=True)]
    return [bar, delta, following]


def chosen(O, avg, mx, t, beta):  # noqa: E741
    return collaborators(O, avg, mx, t, beta)


def table_3_bytes(critical, start):
    """One device's traffic as Table 3 counts it, to hold the measured payloads against.

    4 bytes a value and 1 bit an entry for the mask, upwards; the values of its next model `start` that are
    not 0, downwards; beyond beta its own critical values need not come back.
    """
    return {
        "up": 4 * np.count_nonzero(critical) + critical.size / 8,
        "down": 4.0 * np.count_nonzero(start),
        "down_after_beta": 4.0 * np.count_nonzero(start[~critical]),
    }


def traffic(masks, nxt):
    return [table_3_bytes(m.astype(bool), start) for m, start in zip(masks, nxt, strict=False)]


STEPS = {
    "fedpurin:metric": metric,
    "fedpurin:mask": mask,
    "fedpurin:overlap": overlap,
    "fedpurin:collaborators": chosen,
    "fedpurin:aggregate": aggregate,
    "fedpurin:traffic": traffic,
}
