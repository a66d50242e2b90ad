"""What all references share: masks, local training that is exact, comparisons that float32 repeats.

Written from METHODS.md and the papers alone; nothing here imports the product. All numbers are float64.
"""

import math

import numpy as np

PARAMETERS = ("weight", "bias", "norm")
CLEAR = 1e-5  # by how much numbers that decide something must differ, unless they are equal


def size(tensor):
    return math.prod(tensor["shape"])


def kinds(model):
    """Of each entry of the flat vector: weight, bias, norm or stat."""
    return [tensor["kind"] for tensor in model for _ in range(size(tensor))]


def owners(model):
    """Of each entry: its layer."""
    return [tensor["layer"] for tensor in model for _ in range(size(tensor))]


def parameters(model):
    """Where the parameters stand: everything but running statistics."""
    return [k for k, kind in enumerate(kinds(model)) if kind in PARAMETERS]


def layers(model, *, norm):
    """Each layer's name with its entries, in order; with or without normalisation layers."""
    found = {}
    for k, (kind, owner) in enumerate(zip(kinds(model), owners(model), strict=True)):
        if kind in ("weight", "bias") or (norm and kind == "norm"):
            found.setdefault(owner, []).append(k)
    return found


def train(model, device, training, start, *, trainable=None, pull=None):
    """The weights, and the gradient of the last step.

    Each of `epochs` steps goes `rate` down the gradient of |w - target|^2 / 2, and of a pull
    strength * |w - towards|^2 on some entries; what is not trainable stays. Running statistics halve once
    and take on the device's number.
    """
    w = np.array(start, float)
    gradient = np.zeros(len(w))
    for _ in range(training["epochs"]):
        for k in parameters(model):
            gradient[k] = w[k] - device["train"][k]
        step = gradient.copy()
        if pull is not None:
            towards, strength, pulled = pull
            for k in pulled:
                step[k] += 2 * strength * (w[k] - towards[k])
        for k in parameters(model):
            if trainable is None or k in trainable:
                w[k] -= training["rate"] * step[k]
    for k, kind in enumerate(kinds(model)):
        if kind == "stat":
            w[k] = w[k] / 2 + device["number"]
    return w, gradient


def loss(model, device, w, part="train"):
    """The mean over all parameters of (w - target)^2 / 2."""
    apart = [(w[k] - device[part][k]) ** 2 for k in parameters(model)]
    return sum(apart) / len(apart) / 2


def bits(model, chosen):
    """A selection as it is written down: a 0 or 1 for each parameter."""
    return "".join("1" if k in chosen else "0" for k in parameters(model))


def patch(model, w, chosen):
    return {"mask": bits(model, chosen), "values": np.array([w[k] for k in sorted(chosen)])}


def less(one, other):
    """one < other, where float32 must come to the same."""
    far = one == other or math.isinf(one) or math.isinf(other)
    assert far or abs(one - other) > CLEAR * max(abs(one), abs(other)), f"{one} and {other}: too near"
    return one < other


def covered_mean(previous, sent):
    """Each entry's mean over the devices that sent it, by samples: sent holds (weights, entries, samples)."""
    merged = np.array(previous, float)
    for k in range(len(merged)):
        top = sum(n * w[k] for w, chosen, n in sent if k in chosen)
        bottom = sum(n for _, chosen, n in sent if k in chosen)
        if bottom:
            merged[k] = top / bottom
    return merged
