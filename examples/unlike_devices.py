"""Fleets in which collaboration hurts a third of the devices: their labels are permuted, each in its own way.

What such a device calls "walking" the others call "sitting", as with sensors mounted the other way round, or
an annotator with a scheme of their own. Its task is as hard as before, and everybody else's model is wrong
about it. Each function is a `data.source` of a run.toml with `partition = { kind = "group" }`: a group, a
device. `$FLEETUNE_DATA` is looked in for the original files; `$HAR_SOURCE` is another source of UCI HAR, for
example an .npz.
"""

import os

import numpy as np
from numpy.typing import NDArray

from fleetune.edge_agent.datasets.sources import load

DEVICES, IMAGES, ALPHA = 15, 400, 0.1  # of `fashion`
SEED = 0
Arrays = dict[str, NDArray[np.generic]]


def har() -> Arrays:
    """UCI HAR, two persons a device; of every third device the six activities are permuted."""
    found = load(os.environ.get("HAR_SOURCE", "har:UCI HAR Dataset"))
    person = np.unique(np.asarray(found.group), return_inverse=True)[1]
    return _permuted(found.x, found.y, person // 2)


def fashion() -> Arrays:
    """Fashion-MNIST for `DEVICES` devices with `IMAGES` images each, classes by Dir(`ALPHA`); those of every
    third device are permuted.
    """
    found, rng = load("idx:fashion-mnist"), np.random.default_rng(SEED)
    classes = int(found.y.max()) + 1
    left = [list(rng.permutation(np.flatnonzero(found.y == label))) for label in range(classes)]
    rows = []
    for mix in rng.dirichlet(np.full(classes, ALPHA), DEVICES):
        counts = rng.multinomial(IMAGES, mix)
        rows.append(np.concatenate([_drawn(left[label], count) for label, count in enumerate(counts)]))
    group = np.repeat(np.arange(DEVICES), [len(one) for one in rows])
    taken = np.concatenate(rows)
    return _permuted(found.x[taken], found.y[taken], group)


def _drawn(rows: list[int], count: int) -> NDArray[np.intp]:
    """`count` of these rows, which are taken out of them."""
    taken, rows[:] = rows[:count], rows[count:]
    return np.array(taken, np.intp)


def _permuted(x: NDArray[np.generic], y: NDArray[np.int64], group: NDArray[np.generic]) -> Arrays:
    y, rng = y.copy(), np.random.default_rng(SEED + 1)
    classes = int(y.max()) + 1
    for name in np.unique(group)[::3]:
        order = rng.permutation(classes)
        while (order == np.arange(classes)).any():  # no class keeps its name
            order = rng.permutation(classes)
        mine = group == name
        y[mine] = order[y[mine]]
    return {"x": x, "y": y, "group": group}
