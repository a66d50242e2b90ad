"""Fleets that test `[adoption]`: fifteen devices each, all alike, or with a third that collaboration harms.

Each function is a `data.source` of a run.toml with `partition = { kind = "group" }`: one group for each
device. Functions that end in `_third` make devices 0, 3, 6, ... different from the others, as in real fleets.
These devices have their own label scheme, a sensor mounted the other way round, or a machine whose normal
state is a fault elsewhere. Their task is as hard as before, but the other devices' models are wrong for it.

The original files are searched in `$FLEETUNE_DATA`. `$HAR_SOURCE` is another source of UCI HAR, for example
an .npz.
"""

import os

import numpy as np
from numpy.typing import NDArray

from fleetune.edge_agent.datasets.dataset import Dataset
from fleetune.edge_agent.datasets.sources import load

DEVICES, EVERY, SEED = 15, 3, 0
SHOWN, AHEAD = 96, 16  # samples of a forecast's input and target, at 50 Hz
WALKING = (0, 1, 2)  # activities: walking on the level, upstairs and downstairs
TWO, SEVEN = 2, 7
BLOCK = 8  # number of windows
NEWS = "csv:ag_news/ag_news_test.csv.gz?names=class,title,words&label=class&classes=1,2,3,4&text=title,words"
PRETRAINED_ON = 20_000  # number of Fashion-MNIST images, see ../pretrained/pretrain.py
Arrays = dict[str, NDArray[np.generic]]


def har() -> Arrays:
    """UCI HAR with two persons a device; the labels are six activities."""
    found, device = _persons()
    return {"x": found.x, "y": found.y, "group": device}


def har_third() -> Arrays:
    """As `har`, but every third device has permuted activities."""
    return _permuted(**har())


def forecast() -> Arrays:
    """UCI HAR with two persons a device, as a forecast of walking on the level or on stairs.

    The input is the body's acceleration along the phone's three axes during 1.92 s. The target is the next
    0.32 s along the first axis.
    """
    return _ahead(*_walks())


def forecast_third() -> Arrays:
    """As `forecast`, but every third device's phone is mounted the other way round, with renamed axes."""
    x, whose = _walks()
    turned = whose["group"] % EVERY == 0
    x[turned] = -x[turned][:, [1, 2, 0]]
    return _ahead(x, whose)


def anomaly() -> Arrays:
    """MNIST, 140 images a device: twos are normal, other digits are not."""
    return _inspected(dict.fromkeys(range(DEVICES), TWO))


def anomaly_third() -> Arrays:
    """As `anomaly`, but on every third device sevens are normal, and all other digits, twos included, are
    not.
    """
    return _inspected({device: TWO if device % EVERY else SEVEN for device in range(DEVICES)})


def news() -> Arrays:
    """AG News with 300 texts a device and four classes, mixed by Dir(0.5)."""
    return _dealt(load(NEWS), samples=300, alpha=0.5)


def news_third() -> Arrays:
    """As `news`, but every third device has permuted classes."""
    return _permuted(**news())


def images() -> Arrays:
    """Fashion-MNIST images that ../pretrained/pretrain.py does not use, 80 a device, classes mixed by
    Dir(0.3).
    """
    found = load("idx:fashion-mnist")
    return _dealt(Dataset(found.x[PRETRAINED_ON:], found.y[PRETRAINED_ON:]), samples=80, alpha=0.3)


def images_third() -> Arrays:
    """As `images`, but every third device has permuted classes."""
    return _permuted(**images())


def fashion_third() -> Arrays:
    """Fashion-MNIST with 400 images a device, classes mixed by Dir(0.1); every third device has permuted
    classes.
    """
    return _permuted(**_dealt(load("idx:fashion-mnist"), samples=400, alpha=0.1))


def _persons() -> tuple[Dataset, NDArray[np.intp]]:
    """UCI HAR, and the device of each window."""
    found = load(os.environ.get("HAR_SOURCE", "har:UCI HAR Dataset"))
    person = np.unique(np.asarray(found.group), return_inverse=True)[1]
    return found, person // 2


def _walks() -> tuple[NDArray[np.float32], Arrays]:
    """UCI HAR while a person walks: the body's acceleration, shape (n, 3, 128), and the person of each
    window.

    Windows overlap by half. Consecutive windows form blocks with one role. The last window of each block is
    left out, so that no two blocks share a reading.
    """
    found, device = _persons()
    place = np.empty(len(device), np.intp)
    for one in np.unique(device):
        place[device == one] = np.arange((device == one).sum())
    rows = np.isin(found.y, WALKING) & (place % BLOCK < BLOCK - 1)
    block = device * (place.max() // BLOCK + 1) + place // BLOCK
    return found.x[rows, :3].astype(np.float32), {"group": device[rows], "block": block[rows]}


def _ahead(x: NDArray[np.float32], whose: Arrays) -> Arrays:
    """The first part of each window as input, and its continuation along the first axis as target."""
    return {"x": x[:, :, :SHOWN], "y": x[:, 0, SHOWN : SHOWN + AHEAD], **whose}


def _inspected(normal: dict[int, int]) -> Arrays:
    """80 images of each device's normal digit and 60 of other digits, without repeats."""
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
    """Equally many samples for each device, its mix of classes by Dir(`alpha`), without repeats."""
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
    """Remove `count` of these rows from the list and return them."""
    taken, rows[:] = rows[:count], rows[count:]
    return np.array(taken, np.intp)


def _permuted(x: NDArray[np.generic], y: NDArray[np.int64], group: NDArray[np.intp]) -> Arrays:
    y, rng = y.copy(), np.random.default_rng(SEED + 1)
    classes = int(y.max()) + 1
    for device in range(0, DEVICES, EVERY):
        order = rng.permutation(classes)
        while (order == np.arange(classes)).any():  # no class keeps its label
            order = rng.permutation(classes)
        mine = group == device
        y[mine] = order[y[mine]]
    return {"x": x, "y": y, "group": group}
