"""Samples and partitions that a Python caller passes; they replace the data that [data] names.

The settings of such a run contain `given:DIGEST`, a digest of these arrays. So the run's folder identifies
its data, and the same settings with other arrays are a different run.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import ArrayLike, NDArray

from fleetune.edge_agent.datasets.dataset import Dataset
from fleetune.edge_agent.datasets.sources import from_python, load
from fleetune.protocols.errors import DataError, FleetuneError, SettingError
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.tasks import task_of
from fleetune.protocols.tasks.task import as_classes
from fleetune.protocols.user_code import as_line
from fleetune.protocols.wire.payloads import run_key

Rows = NDArray[np.intp]
# one device's rows: all of them, or its training rows and its test rows
AssignedRows = Rows | tuple[Rows, Rows]
Arrays = tuple[ArrayLike, ArrayLike] | Mapping[str, ArrayLike] | Dataset
Data = str | Arrays | Callable[[], Arrays]
Share = ArrayLike | tuple[ArrayLike, ArrayLike]
Assignment = Callable[[NDArray[Any], int, np.random.Generator], Sequence[Share]] | Sequence[Share]

_GIVEN = "given:"
_DATA, _PARTITION = "data", "partition"  # names of the arguments, for messages


@dataclass(frozen=True)
class CallerSamples:
    """The samples and the partition that the caller passed.

    Attributes:
        dataset: samples of the run; None if `data.source` names them.
        assigned: rows of each device, ascending; None if `data.partition` assigns them.
    """

    dataset: Dataset | None = None
    assigned: tuple[AssignedRows, ...] | None = None

    def samples(self, settings: RunSettings) -> Dataset:
        """Return the run's samples.

        Raises:
            SettingError: the caller passed samples when the run began, but passes none now.
            DataError: see `edge_agent.datasets.sources.load`.
        """
        if self.dataset is not None:
            return _for_task(self.dataset, settings)
        source = settings.data.source
        if source.startswith(_GIVEN):
            raise SettingError(
                f"data.source = {source!r}: the run uses arrays from Python; pass them again as {_DATA}=(x,"
                " y)"
            )
        return _for_task(load(source, None), settings)

    def check(self, settings: RunSettings) -> None:
        """Raise SettingError if the caller assigned rows when the run began, but assigns none now."""
        kind = settings.data.partition.kind
        if kind.startswith(_GIVEN) and self.assigned is None:
            raise SettingError(
                f"data.partition.kind = {kind!r}: rows were assigned from Python; pass {_PARTITION}= again"
            )

    def named_in(self, settings: RunSettings) -> RunSettings:
        """Return the settings with the digests of these samples and this partition."""
        data = settings.data
        if self.dataset is not None:
            data = replace(data, source=_GIVEN + _digest(_columns(self.dataset)))
        if self.assigned is not None:
            kind = _GIVEN + _digest(array for one in self.assigned for array in _arrays(one))
            data = replace(data, partition=replace(data.partition, kind=kind))
        return replace(settings, data=data)


def _for_task(dataset: Dataset, settings: RunSettings) -> Dataset:
    """Return the dataset, with whole-number labels as classes if the task has classes.

    Rows can then be assigned by class.
    """
    if task_of(settings.task).label_form == "numbers":
        return dataset
    return dataclasses.replace(dataset, y=as_classes(dataset.y))


NO_CALLER_SAMPLES = CallerSamples()


def caller_dataset(data: Data | None) -> Dataset | str | None:
    """Return the data set that the argument `data=` means; text is a `data.source`.

    Raises:
        DataError: a function of the caller failed, or the arrays are missing or wrong.
    """
    if data is None or isinstance(data, str):
        return data
    if callable(data):
        try:
            data = data()
        except FleetuneError:
            raise
        except Exception as problem:  # a user's function may raise anything
            raise DataError(f"{_DATA}: your function failed: {as_line(problem)}") from problem
    return from_python(f"{_DATA} is", _DATA, data)


def caller_samples(
    settings: RunSettings, dataset: Dataset | None, assignment: Assignment | None
) -> CallerSamples:
    """Return the samples and the partition that the caller passed for a run.

    Args:
        settings: settings of the run; a function that assigns rows draws from its seed.
        dataset: result of `caller_dataset`.
        assignment: the argument `partition=`: for each device its rows, or its (training rows, test rows). Or
            a function of (labels, number of devices, random generator) that returns these.

    Raises:
        SettingError: the function failed, or its result does not assign rows of the samples to each device.
        DataError: see `edge_agent.datasets.sources.load`.
    """
    if assignment is None:
        return CallerSamples(dataset)
    samples = CallerSamples(dataset).samples(settings)
    devices = settings.fleet.devices
    if callable(assignment):
        rng = run_key(settings.run.seed).child(_PARTITION, "given").generator()
        try:
            assignment = assignment(samples.y, devices, rng)
        except Exception as problem:  # a user's function may raise anything
            raise SettingError(f"{_PARTITION}: your function failed: {as_line(problem)}") from problem
    try:
        shares = list(assignment)
    except TypeError:
        raise SettingError(
            f"{_PARTITION}: {type(assignment).__name__} is no list of rows, one for each device"
        ) from None
    if len(shares) != devices:
        raise SettingError(
            f"{_PARTITION}: it assigns rows to {len(shares)} devices, but fleet.devices = {devices}"
        )
    size = len(samples.y)
    return CallerSamples(
        dataset, tuple(_assigned(share, device, size) for device, share in enumerate(shares))
    )


def _assigned(share: Share, device: int, size: int) -> AssignedRows:
    if not (isinstance(share, tuple) and len(share) == 2 and all(np.ndim(part) == 1 for part in share)):
        return _rows(share, device, size, 2)
    train, test = _rows(share[0], device, size, 1), _rows(share[1], device, size, 1)
    if (both := np.intersect1d(train, test)).size:
        raise SettingError(
            f"{_PARTITION}: device {device} has row {both[0]} for training and for testing; use it for one"
        )
    return train, test


def _rows(share: Any, device: int, size: int, least: int) -> Rows:
    rows = np.asarray(share)
    if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
        raise SettingError(
            f"{_PARTITION}: device {device} has {rows.dtype} of shape {rows.shape}; row numbers are due"
        )
    if rows.size < least:
        raise SettingError(f"{_PARTITION}: device {device} has {rows.size} rows, and it needs {least}")
    ordered = np.sort(rows).astype(np.intp)
    if ordered[0] < 0 or ordered[-1] >= size:
        raise SettingError(
            f"{_PARTITION}: device {device} has rows {ordered[0]} to {ordered[-1]}; there are {size}"
        )
    if (twice := ordered[1:][ordered[1:] == ordered[:-1]]).size:
        raise SettingError(f"{_PARTITION}: device {device} has row {twice[0]} twice")
    return ordered


def _columns(dataset: Dataset) -> list[NDArray[Any] | None]:
    others = ("source", "benchmark", "arrays", "columns")  # the last two only describe x
    columns = [getattr(dataset, one.name) for one in fields(dataset) if one.name not in others]
    return [*columns, np.array(dataset.benchmark)]


def _arrays(assigned: AssignedRows) -> list[NDArray[Any] | None]:
    return [*assigned] if isinstance(assigned, tuple) else [assigned, None]


def _digest(arrays: Any) -> str:
    """Return a digest of shapes, types and contents: 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for array in arrays:
        if array is None:
            digest.update(b"-")
            continue
        plain = array.astype(str) if array.dtype.kind == "O" else array
        digest.update(f"{plain.dtype.str}{plain.shape}".encode())
        digest.update(np.ascontiguousarray(plain).view(np.uint8).data)
    return digest.hexdigest()[:16]
