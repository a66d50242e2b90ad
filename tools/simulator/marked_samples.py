"""What users mark as test or validation in their own data keeps that role on whatever device it comes to."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fleetune.edge_agent.datasets.sample_roles import below, draws
from fleetune.edge_agent.training.device_data import Dataset
from fleetune.protocols.errors import SettingError
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.simulation import Partition
from fleetune.tools.simulator.given import Dealt
from fleetune.tools.simulator.partition import Rows, Split, deal, num_test_rows, parted

Mask = NDArray[np.bool_]


class Splits(Protocol):
    """Each device's training rows and test rows."""

    def __getitem__(self, device: int) -> Split: ...

    def __iter__(self) -> Iterator[Split]: ...

    def sizes(self, device: int) -> tuple[int, int]:
        """How many training rows and test rows it has."""
        ...


class Parted(list[Split]):
    """Splits that are there already."""

    def sizes(self, device: int) -> tuple[int, int]:
        """See `Splits`."""
        train, test = self[device]
        return train.size, test.size


@dataclass(frozen=True)
class PartedWhenAsked:
    """Splits by class, each made when it is first asked for: most devices of a large fleet never work.

    Attributes:
        dealt: rows of each device.
        strata: by what they are split, see `Dataset`.
        settings: [data] partition.
        key: the same key splits the same.
    """

    dealt: Sequence[Rows]
    strata: NDArray[np.int64]
    settings: Partition
    key: Key
    _made: dict[int, Split] = field(default_factory=dict)

    def __getitem__(self, device: int) -> Split:
        if device not in self._made:
            rows = self.dealt[device]
            self._made[device] = parted(rows, self.strata, self.settings, device, self.key)
        return self._made[device]

    def __iter__(self) -> Iterator[Split]:
        return (self[device] for device in range(len(self.dealt)))

    def sizes(self, device: int) -> tuple[int, int]:
        """See `Splits`."""
        num_rows = self.dealt[device].size
        num_test = num_test_rows(num_rows, self.settings)
        return num_rows - num_test, num_test


def splits_of(
    dataset: Dataset,
    settings: Partition,
    num_devices: int,
    key: Key,
    given: Sequence[Dealt] | None = None,
) -> Splits:
    """Each device's training rows, marked validation rows among them, and its test rows.

    A device that was dealt nothing to train on, or nothing to test on, gets a sample from whoever has the
    most of them, but where groups must stay whole or the caller dealt.

    Args:
        dataset: with its marks.
        settings: [data] partition.
        num_devices: at least 1.
        key: the same key deals the same.
        given: what the caller dealt to each device, instead of `deal`; rows that were given as training rows
            and test rows are these whatever is marked.

    Raises:
        SettingError: as `partition`; or there are too few marked or unmarked samples, or groups that must
            stay whole lack them.
    """
    if given is None:
        dealt = deal(dataset.strata, dataset.group, settings, num_devices, key)
    elif any(isinstance(one, tuple) for one in given):
        return Parted(
            one if isinstance(one, tuple) else parted(one, dataset.strata, settings, device, key)
            for device, one in enumerate(given)
        )
    else:
        dealt = [rows for rows in given if not isinstance(rows, tuple)]
    if dataset.block is not None and dataset.test is None:
        return _by_blocks(dataset, settings, dealt)
    if dataset.benchmark or (dataset.test is None and dataset.validation is None):
        return PartedWhenAsked(dealt, dataset.strata, settings, key)
    nobody = np.zeros(len(dataset.y), np.bool_)
    test, validation = (nobody if mask is None else mask for mask in (dataset.test, dataset.validation))
    firm = settings.kind == "group" or given is not None
    share_out = partial(_shared_out, source=dataset.source, kind=settings.kind, firm=firm, key=key)
    if dataset.test is not None:
        dealt = share_out(dealt, test, "as test", 1)
        dealt = share_out(dealt, ~test & ~validation, "for training", 1)
        return Parted((rows[~test[rows]], rows[test[rows]]) for rows in dealt)
    dealt = share_out(dealt, ~validation, "for training and testing", 2)
    return Parted(
        _drawn(rows, validation, partial(parted, y=dataset.strata, settings=settings, device=device, key=key))
        for device, rows in enumerate(dealt)
    )


def _by_blocks(dataset: Dataset, settings: Partition, dealt: Sequence[Rows]) -> Splits:
    """Samples that overlap are trained on together or tested on together, as on a real device.

    Raises:
        SettingError: a device was dealt no two blocks.
    """
    numbers, _ = draws(dataset.x, dataset.y, dataset.block)
    splits = Parted()
    for device, rows in enumerate(dealt):
        test = below(numbers[rows], settings.test_fraction)
        if not test.any():
            raise SettingError(
                f"data.partition: device {device} has samples of one block of {dataset.source}, which cannot"
                " be trained on and tested on; lower fleet.devices, or make blocks shorter"
            )
        splits.append((rows[~test], rows[test]))
    return splits


def _drawn(rows: Rows, validation: Mask, part: Callable[[Rows], Split]) -> Split:
    """The test rows are drawn from those that are not marked as validation."""
    train, test = part(rows[~validation[rows]])
    return np.sort(np.concatenate([train, rows[validation[rows]]])), test


def _shared_out(
    dealt: list[Rows], mask: Mask, what: str, wanted: int, *, source: str, kind: str, firm: bool, key: Key
) -> list[Rows]:
    """Nobody has fewer than `wanted` rows of the mask."""
    dealt, rng = list(dealt), key.child("marks", what).generator()
    counts = np.array([mask[rows].sum() for rows in dealt])
    fixed = firm or counts.sum() < wanted * len(dealt)
    while counts.min() < wanted:
        poor, rich = int(counts.argmin()), int(counts.argmax())
        if fixed:
            raise SettingError(
                f"data.partition: by the marks in {source}, kind `{kind}` leaves device {poor} with"
                f" {counts[poor]} samples {what}, and it needs {wanted}; lower fleet.devices"
            )
        row = rng.choice(np.setdiff1d(dealt[rich][mask[dealt[rich]]], dealt[poor]))
        dealt[poor] = np.sort(np.append(dealt[poor], row))
        dealt[rich] = dealt[rich][dealt[rich] != row]
        counts[poor] += 1
        counts[rich] -= 1
    return dealt
