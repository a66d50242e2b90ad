"""Splits samples by the test and validation marks in users' own data; marks apply on every device."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fleetune.edge_agent.datasets.dataset import Dataset
from fleetune.edge_agent.datasets.train_test_split import select_below, split_draws
from fleetune.protocols.errors import SettingError
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.simulation import Partition
from fleetune.tools.simulator.caller_samples import AssignedRows
from fleetune.tools.simulator.partition import Rows, Split, assign_rows, num_test_rows, split_rows

Mask = NDArray[np.bool_]


class Splits(Protocol):
    """Training rows and test rows of each device."""

    def __getitem__(self, device: int) -> Split: ...

    def __iter__(self) -> Iterator[Split]: ...

    def sizes(self, device: int) -> tuple[int, int]:
        """Return the number of training rows and of test rows of a device."""
        ...


class RowSplits(list[Split]):
    """Splits that are already computed."""

    def sizes(self, device: int) -> tuple[int, int]:
        """See `Splits`."""
        train, test = self[device]
        return train.size, test.size


@dataclass(frozen=True)
class LazyRowSplits:
    """Splits by class, each created at its first use, because most devices of a large fleet never train.

    Attributes:
        assigned: rows of each device.
        strata: classes for stratified splits, see `Dataset`.
        settings: [data] partition.
        key: equal keys give equal splits.
    """

    assigned: Sequence[Rows]
    strata: NDArray[np.int64]
    settings: Partition
    key: Key
    _made: dict[int, Split] = field(default_factory=dict)

    def __getitem__(self, device: int) -> Split:
        if device not in self._made:
            rows = self.assigned[device]
            self._made[device] = split_rows(rows, self.strata, self.settings, device, self.key)
        return self._made[device]

    def __iter__(self) -> Iterator[Split]:
        return (self[device] for device in range(len(self.assigned)))

    def sizes(self, device: int) -> tuple[int, int]:
        """See `Splits`."""
        num_rows = self.assigned[device].size
        num_test = num_test_rows(num_rows, self.settings)
        return num_rows - num_test, num_test


def splits_of(
    dataset: Dataset,
    settings: Partition,
    num_devices: int,
    key: Key,
    by_caller: Sequence[AssignedRows] | None = None,
) -> Splits:
    """Return each device's training rows, with marked validation rows among them, and its test rows.

    A device without training rows, or without test rows, gets one from the device with the most of them.
    Groups that stay whole and rows that the caller assigned are not changed.

    Args:
        dataset: the samples with their marks.
        settings: [data] partition.
        num_devices: at least 1.
        key: equal keys assign equal rows.
        by_caller: rows that the caller assigned to each device; None: `assign_rows` assigns them. The
            caller's training rows and test rows keep their role; marks do not change it.

    Raises:
        SettingError: see `partition`; or there are too few marked or unmarked samples, or groups that must
            stay whole lack them.
    """
    if by_caller is None:
        assigned = assign_rows(dataset.strata, dataset.group, settings, num_devices, key)
    elif any(isinstance(one, tuple) for one in by_caller):
        return RowSplits(
            one if isinstance(one, tuple) else split_rows(one, dataset.strata, settings, device, key)
            for device, one in enumerate(by_caller)
        )
    else:
        assigned = [rows for rows in by_caller if not isinstance(rows, tuple)]
    if dataset.block is not None and dataset.test is None:
        return _by_blocks(dataset, settings, assigned)
    if dataset.benchmark or (dataset.test is None and dataset.validation is None):
        return LazyRowSplits(assigned, dataset.strata, settings, key)
    nobody = np.zeros(len(dataset.y), np.bool_)
    test, validation = (nobody if mask is None else mask for mask in (dataset.test, dataset.validation))
    firm = settings.kind == "group" or by_caller is not None
    share_out = partial(_shared_out, source=dataset.source, kind=settings.kind, firm=firm, key=key)
    if dataset.test is not None:
        assigned = share_out(assigned, test, "as test", 1)
        assigned = share_out(assigned, ~test & ~validation, "for training", 1)
        return RowSplits((rows[~test[rows]], rows[test[rows]]) for rows in assigned)
    assigned = share_out(assigned, ~validation, "for training and testing", 2)
    return RowSplits(
        _drawn(
            rows, validation, partial(split_rows, y=dataset.strata, settings=settings, device=device, key=key)
        )
        for device, rows in enumerate(assigned)
    )


def _by_blocks(dataset: Dataset, settings: Partition, assigned: Sequence[Rows]) -> Splits:
    """Return splits in which overlapping samples have the same role, as on a real device.

    Raises:
        SettingError: a device has fewer than two blocks.
    """
    numbers, _ = split_draws(dataset.x, dataset.y, dataset.block)
    splits = RowSplits()
    for device, rows in enumerate(assigned):
        test = select_below(numbers[rows], settings.test_fraction)
        if not test.any():
            raise SettingError(
                f"data.partition: device {device} has samples of one block of {dataset.source}, which cannot"
                " be trained on and tested on; lower fleet.devices, or make blocks shorter"
            )
        splits.append((rows[~test], rows[test]))
    return splits


def _drawn(rows: Rows, validation: Mask, part: Callable[[Rows], Split]) -> Split:
    """Return a split whose test rows are drawn from the rows that are not marked for validation."""
    train, test = part(rows[~validation[rows]])
    return np.sort(np.concatenate([train, rows[validation[rows]]])), test


def _shared_out(
    assigned: list[Rows], mask: Mask, what: str, wanted: int, *, source: str, kind: str, firm: bool, key: Key
) -> list[Rows]:
    """Move rows of the mask between devices until each device has at least `wanted` of them."""
    assigned, rng = list(assigned), key.child("marks", what).generator()
    counts = np.array([mask[rows].sum() for rows in assigned])
    fixed = firm or counts.sum() < wanted * len(assigned)
    while counts.min() < wanted:
        poor, rich = int(counts.argmin()), int(counts.argmax())
        if fixed:
            raise SettingError(
                f"data.partition: by the marks in {source}, kind `{kind}` leaves device {poor} with"
                f" {counts[poor]} samples {what}, and it needs {wanted}; lower fleet.devices"
            )
        row = rng.choice(np.setdiff1d(assigned[rich][mask[assigned[rich]]], assigned[poor]))
        assigned[poor] = np.sort(np.append(assigned[poor], row))
        assigned[rich] = assigned[rich][assigned[rich] != row]
        counts[poor] += 1
        counts[rich] -= 1
    return assigned
