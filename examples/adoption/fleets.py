"""Fleets to judge `[adoption]` on: fifteen devices each, alike, or with a third on which collaboration hurts.

Each function is a `data.source` of a run.toml with `partition = { kind = "group" }`: a group, a device. Those
that end in `_third` make devices 0, 3, 6, ... unlike the others, as happens in real fleets: a label scheme of
their own, a sensor mounted the other way round, a machine whose normal is another's fault. Their task is as
hard as before, and everybody else's model is wrong about it.

`$FLEETUNE_DATA` is looked in for the original files; `$HAR_SOURCE` is another source of UCI HAR, for example
an .npz.
"""

import os

import numpy as np
from numpy.typing import NDArray

from fleetune.edge_agent.datasets.dataset import Dataset
from fleetune.edge_agent.datasets.sources import load

DEVICES, EVERY, SEED = 15, 3, 0
SHOWN, AHEAD = 96, 16  # samples of a forecast's windows, at 50 Hz
WALKING = (0, 1, 2)  # on the level, up and down stairs
TWO, SEVEN = 2, 7
BLOCK = 8  # windows
NEWS = "csv:ag_news/ag_news_test.csv.gz?names=class,title,words&label=class&classes=1,2,3,4&text=title,words"
PRETRAINED_ON = 20_000  # of Fashion-MNIST's images, see ../pretrained/pretrain.py
Arrays = dict[str, NDArray[np.generic]]


def har() -> Arrays:
    """UCI HAR, two persons a device: which of six activities."""
    found, device = _persons()
    return {"x": found.x, "y": found.y, "group": device}


def har_third() -> Arrays:
    """Of every third device the six activities are permuted."""
    return _permuted(**har())


def forecast() -> Arrays:
    """UCI HAR, two persons a device: how the body accelerates along the three axes of the phone in 1.92 s of
    walking on the level or on stairs, and in the 0.32 s after along the first.
    """
    return _ahead(*_walks())


def forecast_third() -> Arrays:
    """Every third device's phone is mounted the other way round, and its axes are called otherwise."""
    x, whose = _walks()
    turned = whose["group"] % EVERY == 0
    x[turned] = -x[turned][:, [1, 2, 0]]
    return _ahead(x, whose)


def anomaly() -> Arrays:
    """MNIST, 140 images a device: twos are normal, other digits are not."""
    return _inspected(dict.fromkeys(range(DEVICES), TWO))


def anomaly_third() -> Arrays:
    """For every third device sevens are normal, and other digits, twos among them, are not."""
    return _inspected({device: TWO if device % EVERY else SEVEN for device in range(DEVICES)})


def news() -> Arrays:
    """AG News, 300 texts a device, classes by Dir(0.5): which of four."""
    return _dealt(load(NEWS), samples=300, alpha=0.5)


def news_third() -> Arrays:
    """Of every third device the four classes are permuted."""
    return _permuted(**news())


def images() -> Arrays:
    """Fashion-MNIST that ../pretrained/pretrain.py has not seen, 80 images a device, classes by Dir(0.3)."""
    found = load("idx:fashion-mnist")
    return _dealt(Dataset(found.x[PRETRAINED_ON:], found.y[PRETRAINED_ON:]), samples=80, alpha=0.3)


def images_third() -> Arrays:
    """Of every third device the ten classes are permuted."""
    return _permuted(**images())


def fashion_third() -> Arrays:
    """Fashion-MNIST, 400 images a device, classes by Dir(0.1); of every third device they are permuted."""
    return _permuted(**_dealt(load("idx:fashion-mnist"), samples=400, alpha=0.1))


def _persons() -> tuple[Dataset, NDArray[np.intp]]:
    """UCI HAR, and each window's device."""
    found = load(os.environ.get("HAR_SOURCE", "har:UCI HAR Dataset"))
    person = np.unique(np.asarray(found.group), return_inverse=True)[1]
    return found, person // 2


def _walks() -> tuple[NDArray[np.float32], Arrays]:
    """UCI HAR while a person walks: the body's acceleration, shape (n, 3, 128), and whose it is.

    Windows overlap by half. Blocks of them that follow one another have one role; the last of each is left
    out, so that no two blocks share a reading.
    """
    found, device = _persons()
    place = np.empty(len(device), np.intp)
    for one in np.unique(device):
        place[device == one] = np.arange((device == one).sum())
    rows = np.isin(found.y, WALKING) & (place % BLOCK < BLOCK - 1)
    block = device * (place.max() // BLOCK + 1) + place // BLOCK
    return found.x[rows, :3].astype(np.float32), {"group": device[rows], "block": block[rows]}


def _ahead(x: NDArray[np.float32], whose: Arrays) -> Arrays:
    """Of each window the first part, and how it goes on along the first axis."""
    return {"x": x[:, :, :SHOWN], "y": x[:, 0, SHOWN : SHOWN + AHEAD], **whose}


def _inspected(normal: dict[int, int]) -> Arrays:
    """To each device 80 images of its normal digit and 60 of others, nothing twice."""
    found, rng = load("idx:mnist"), np.random.default_rng(SEED)
    left = rng.permutation(len(found.y))
    x, y, group = [], [], []
    for device, digit in normal.items():
        own = found.y[left] == digit
        rows = np.concatenate([np.flatnonzero(own)[:80], np.flatnonzero(~own)[:60]])
        x.append(found.x[left[rows]])
        y.append((~own[rows]).astype(np.int64))
        group.append(np.full(len(rows), device))
        left = np.delete(left, rows)
    return {"x": np.concatenate(x), "y": np.concatenate(y), "group": np.concatenate(group)}


def _dealt(found: Dataset, samples: int, alpha: float) -> Arrays:
    """As many samples to each device, its mix of classes by Dir(`alpha`), nothing twice."""
    rng = np.random.default_rng(SEED)
    classes = int(found.y.max()) + 1
    left = [list(rng.permutation(np.flatnonzero(found.y == label))) for label in range(classes)]
    rows = []
    for mix in rng.dirichlet(np.full(classes, alpha), DEVICES):
        counts = rng.multinomial(samples, mix)
        rows.append(np.concatenate([_drawn(left[label], count) for label, count in enumerate(counts)]))
    taken = np.concatenate(rows)
    return {
        "x": found.x[taken],
        "y": found.y[taken],
        "group": np.repeat(np.arange(DEVICES), [len(one) for one in rows]),
    }


def _drawn(rows: list[int], count: int) -> NDArray[np.intp]:
    """`count` of these rows, which are taken out of them."""
    taken, rows[:] = rows[:count], rows[count:]
    return np.array(taken, np.intp)


def _permuted(x: NDArray[np.generic], y: NDArray[np.int64], group: NDArray[np.intp]) -> Arrays:
    y, rng = y.copy(), np.random.default_rng(SEED + 1)
    classes = int(y.max()) + 1
    for device in range(0, DEVICES, EVERY):
        order = rng.permutation(classes)
        while (order == np.arange(classes)).any():  # no class keeps its name
            order = rng.permutation(classes)
        mine = group == device
        y[mine] = order[y[mine]]
    return {"x": x, "y": y, "group": group}
