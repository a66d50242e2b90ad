"""Partitions one data set over simulated devices by the methods of the papers.

For all kinds, each device's rows are split by class into training and test rows. A device has at least two
samples: missing rows are moved from the device with the most. Groups stay whole, so too few samples in a
group are an error. The test samples of a published benchmark are assigned like all other samples, because a
personal model is tested on its device's own class mix. Samples that users mark keep their role (see
`tools.simulator.marked_samples`).
"""

import numpy as np
from numpy.typing import NDArray

from fleetune.edge_agent.training.device_data import apportion, num_stratified, stratified
from fleetune.protocols.errors import SettingError
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.simulation import Partition

Rows = NDArray[np.intp]
Split = tuple[Rows, Rows]  # training rows, test rows, each ascending

_MIN_SAMPLES = 2
_DISJOINT_KINDS = ("iid", "dirichlet", "alpha-rho")


def assign_rows(
    y: NDArray[np.int64], group: NDArray[np.generic] | None, settings: Partition, num_devices: int, key: Key
) -> list[Rows]:
    """Return the rows of each device.

    Devices have no row in common, except with `mix` and `primary`, which use the rows of an exhausted class
    again. No device has a row twice. `samples` is the number of rows of every device for `iid`, `mix` and
    `primary`, and the maximum for the other kinds (cut by class).

    Args:
        y: labels, shape (n,).
        group: the group of each sample, shape (n,); only kind `group` needs it.
        settings: the section [data] partition.
        num_devices: at least 1.
        key: equal keys give equal partitions.

    Raises:
        SettingError: the kind is unknown, or there are not enough samples, classes or groups for it.
    """
    pool = _pool(y.size, settings.pool, key)
    if settings.samples is not None and settings.samples > pool.size:
        raise SettingError(
            f"data.partition.samples = {settings.samples} for each device, but the source has {pool.size}"
            " samples; lower it, or raise data.partition.pool"
        )
    classes = np.unique(y[pool], return_inverse=True)[1]
    groups = None if group is None else group[pool]
    shares = _shares(classes, groups, settings, num_devices, key.child("shares").generator())
    assigned = []
    for device, share in enumerate(shares):
        rows = np.sort(pool[share])
        if settings.samples and rows.size > settings.samples:
            rows = rows[stratified(y[rows], settings.samples / rows.size, key.child("cap", device))]
        assigned.append(rows)
    return assigned


def split_rows(rows: Rows, y: NDArray[np.int64], settings: Partition, device: int, key: Key) -> Split:
    """Return a device's rows as training and test rows, split by class."""
    test = stratified(y[rows], settings.test_fraction, key.child("test", device))
    return rows[~test], rows[test]


def num_test_rows(num_rows: int, settings: Partition) -> int:
    """Return the number of test rows that `split_rows` assigns to a device."""
    return num_stratified(num_rows, settings.test_fraction)


def _pool(num_samples: int, fraction: float, key: Key) -> Rows:
    """Return a random part of the rows, ascending, to assign to devices; at least one row."""
    if fraction == 1:
        return np.arange(num_samples)
    size = max(1, round(fraction * num_samples))
    return np.sort(key.child("pool").permutation(num_samples)[:size])


def _shares(
    classes: Rows,
    group: NDArray[np.generic] | None,
    settings: Partition,
    num_devices: int,
    rng: np.random.Generator,
) -> list[Rows]:
    if settings.kind == "group":
        return _by_group(group, num_devices, rng)
    if settings.kind in ("mix", "primary"):
        return _by_mix(classes, settings, num_devices, rng)
    if settings.kind not in _DISJOINT_KINDS:
        known = ", ".join((*_DISJOINT_KINDS, "mix", "primary", "group"))
        raise SettingError(f"data.partition.kind: {settings.kind!r} is unknown; known: {known}")
    _check_enough(classes.size, _MIN_SAMPLES, num_devices)
    if settings.kind == "iid":
        return _iid(classes, settings, num_devices, rng)
    draw_owners = _dirichlet if settings.kind == "dirichlet" else _alpha_rho
    owner = draw_owners(classes, settings, num_devices, rng)
    return _topped_up([np.flatnonzero(owner == device) for device in range(num_devices)], rng)


def _check_enough(num_samples: int, wanted: int, num_devices: int) -> None:
    if wanted * num_devices > num_samples:
        raise SettingError(
            f"data.partition: {num_devices} devices with {wanted} samples each need {wanted * num_devices},"
            f" the source has {num_samples}; lower fleet.devices or data.partition.samples"
        )


def _iid(classes: Rows, settings: Partition, num_devices: int, rng: np.random.Generator) -> list[Rows]:
    """Return equal shares of all rows, in random order."""
    size = settings.samples or classes.size // num_devices
    _check_enough(classes.size, size, num_devices)
    order = rng.permutation(classes.size)
    return np.array_split(order[: size * num_devices] if settings.samples else order, num_devices)


def _dirichlet(classes: Rows, settings: Partition, num_devices: int, rng: np.random.Generator) -> Rows:
    """Return each row's device: every class is split over all devices by Dir(alpha).

    Hsu et al. 2019; FedSPU section 5, KAPC section 7.1.
    """
    owner = np.empty(classes.size, np.intp)
    for rows in _rows_by_class(classes, rng):
        cuts = np.cumsum(rng.dirichlet(np.full(num_devices, settings.alpha)))[:-1]
        owner[rows] = np.searchsorted(cuts, np.arange(rows.size) / rows.size, side="right")
    return owner


def _alpha_rho(classes: Rows, settings: Partition, num_devices: int, rng: np.random.Generator) -> Rows:
    """Return each row's device: Bernoulli(rho) draws each device's classes, Dir(alpha) splits a class.

    FedCorr (Xu et al. 2022, section 5.1); SRP-pFed section V-A. As in FedCorr's code, a device without any
    class draws again, and a class without any device gets one.
    """
    rows_by_class = _rows_by_class(classes, rng)
    holds = rng.random((num_devices, len(rows_by_class))) < settings.rho
    while (idle := ~holds.any(axis=1)).any():
        holds[idle] = rng.random((int(idle.sum()), holds.shape[1])) < settings.rho
    orphans = np.flatnonzero(~holds.any(axis=0))
    holds[rng.integers(num_devices, size=orphans.size), orphans] = True
    owner = np.empty(classes.size, np.intp)
    for rows, held in zip(rows_by_class, holds.T, strict=True):
        holders = np.flatnonzero(held)
        owner[rows] = rng.choice(holders, rows.size, p=rng.dirichlet(np.full(holders.size, settings.alpha)))
    return owner


def _by_mix(classes: Rows, settings: Partition, num_devices: int, rng: np.random.Generator) -> list[Rows]:
    """Return equally many rows for each device, with the device's own class mix, see `_mixes`."""
    size = settings.samples or max(_MIN_SAMPLES, classes.size // num_devices)
    _check_enough(classes.size, size, 1 if settings.samples else num_devices)
    members = _members(classes)
    pools = [rng.permutation(rows) for rows in members]
    available = np.array([rows.size for rows in pools])
    shares = []
    for mix in _mixes(settings, num_devices, available.size, rng):
        counts = apportion(mix, size)
        excess = int(np.maximum(counts - available, 0).sum())
        counts = np.minimum(counts, available)
        if excess:  # the class has too few rows: the other classes fill up as far as they can
            counts += apportion(available - counts, excess)
        taken = []
        for label, count in enumerate(counts):
            rows, pools[label] = _take(pools[label], count, members[label], rng)
            taken.append(rows)
        shares.append(np.concatenate(taken))
    return shares


def _mixes(
    settings: Partition, num_devices: int, num_classes: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Return the class fractions of each device, shape (num_devices, num_classes).

    `mix`: q ~ Dir(alpha) for each device (FedPURIN section 4.1, the split of FedCAC's code). `primary`: a
    primary class 40-60 %, a secondary one 20-40 %, the other classes alike (DC-PFL section V-A).
    """
    if settings.kind == "mix":
        return rng.dirichlet(np.full(num_classes, settings.alpha), num_devices)
    if num_classes < 3:
        raise SettingError(
            f"data.partition.kind: `primary` needs 3 classes or more, the source has {num_classes}"
        )
    mixes = np.empty((num_devices, num_classes))
    for mix in mixes:
        primary, secondary = rng.choice(num_classes, 2, replace=False)
        fractions = rng.uniform((0.4, 0.2), (0.6, 0.4))
        mix[:] = (1 - fractions.sum()) / (num_classes - 2)
        mix[[primary, secondary]] = fractions
    return mixes


def _take(pool: Rows, count: int, everything: Rows, rng: np.random.Generator) -> tuple[Rows, Rows]:
    """Return `count` rows from the front of `pool`, and the remaining pool.

    An empty pool is filled again with all rows of the class except those just taken. From then on devices
    share samples.
    """
    taken, left = pool[:count], pool[count:]
    missing = count - taken.size
    if missing:
        again = rng.permutation(np.setdiff1d(everything, taken, assume_unique=True))
        taken, left = np.concatenate([taken, again[:missing]]), again[missing:]
    return taken, left


def _by_group(group: NDArray[np.generic] | None, num_devices: int, rng: np.random.Generator) -> list[Rows]:
    """Assign whole groups to devices: group i to device i if their numbers agree, else in random order."""
    if group is None:
        raise SettingError("data.partition.kind: `group` needs a source with a `group` column")
    names, of = np.unique(group, return_inverse=True)
    if names.size < num_devices:
        raise SettingError(
            f"fleet.devices: {num_devices} devices, but the source has only {names.size} groups"
        )
    turn = np.arange(names.size) if names.size == num_devices else rng.permutation(names.size)
    owner = turn[of] % num_devices
    shares = [np.flatnonzero(owner == device) for device in range(num_devices)]
    smallest = min(shares, key=len)
    if smallest.size < _MIN_SAMPLES:
        raise SettingError(
            f"data.partition.kind: group {group[smallest[0]]} has 1 sample, a device needs {_MIN_SAMPLES};"
            " lower fleet.devices so that groups are joined"
        )
    return shares


def _rows_by_class(classes: Rows, rng: np.random.Generator) -> list[Rows]:
    """Return each class's rows in random order."""
    return [rng.permutation(rows) for rows in _members(classes)]


def _members(classes: Rows) -> list[Rows]:
    """Return each class's rows, ascending."""
    return [np.flatnonzero(classes == label) for label in range(classes.max() + 1)]


def _topped_up(shares: list[Rows], rng: np.random.Generator) -> list[Rows]:
    """Move random rows from the largest share to shares with fewer than two rows; return the shares."""
    for device in range(len(shares)):
        while shares[device].size < _MIN_SAMPLES:
            rich = max(range(len(shares)), key=lambda other: shares[other].size)
            place = rng.integers(shares[rich].size)
            shares[device] = np.append(shares[device], shares[rich][place])
            shares[rich] = np.delete(shares[rich], place)
    return shares
