"""A device's own samples in the model's shape: training, validation and test."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from fleetune.edge_agent.datasets.dataset import ArrayShapes, Dataset
from fleetune.edge_agent.datasets.npz import write_npz
from fleetune.edge_agent.datasets.sources import load
from fleetune.edge_agent.datasets.train_test_split import select_below, split_draws
from fleetune.edge_agent.training.backend import InputArray, LabelArray
from fleetune.protocols.errors import DataError, SettingError
from fleetune.protocols.method.trainer import Part
from fleetune.protocols.model.input_scaling import Mean, Std, as_floats, check_channels, over_channels
from fleetune.protocols.model.interface import listed_shapes
from fleetune.protocols.model.spec import ModelSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.tasks import CLASSIFICATION
from fleetune.protocols.tasks.task import Task

Rows = NDArray[np.intp]
Inputs = NDArray[np.generic]


@dataclass(frozen=True)
class DeviceData:
    """The samples that a device trains and tests on.

    Attributes:
        x_train, x_validation, x_test: inputs, shape (n, ...), uint8 or float32 as the source provides them.
            Each batch is converted on demand, so that bytes stay bytes in memory.
        y_train, y_validation, y_test: labels, shape (n,) or (n, numbers), see `protocols.tasks`. The
            validation part may be empty.
        mean, std: from [data]. The model gets (x / 255 if uint8 else x) minus mean, divided by std. A list
            has one number for each channel of the model's input.
        ids: True if samples are token ids, which the model gets unchanged as int64.
        source: name of the source, for messages.
        order: position of each sample of the source among the training samples, followed by the validation
            samples; None if they are in that order already. Samples that are never trained on have no
            position.
        never_trained: True at validation samples that only serve to score models (anomalies for an
            autoencoder), shape (n,). They count in no loss; None if there are none.
        arrays: see `Dataset.arrays`.
    """

    x_train: Inputs
    y_train: LabelArray
    x_validation: Inputs
    y_validation: LabelArray
    x_test: Inputs
    y_test: LabelArray
    mean: Mean = 0.0
    std: Std = 1.0
    ids: bool = False
    source: str = "data"
    order: Rows | None = None
    never_trained: NDArray[np.bool_] | None = None
    arrays: ArrayShapes = ()

    def part(self, part: Part) -> tuple[Inputs, LabelArray]:
        """Return the stored inputs and labels of a part."""
        return {
            "train": (self.x_train, self.y_train),
            "validation": (self.x_validation, self.y_validation),
            "test": (self.x_test, self.y_test),
        }[part]

    def size(self, part: Part) -> int:
        """Return the number of samples in a part."""
        return len(self.part(part)[1])

    @property
    def compared(self) -> Rows:
        """Indices of the validation samples that count in the loss, ascending."""
        number = self.size("validation")
        return np.arange(number) if self.never_trained is None else np.flatnonzero(~self.never_trained)

    def without_validation(self) -> "DeviceData":
        """Return the data with the validation samples added to training, in the source's order, in new
        arrays.
        """
        order = slice(None) if self.order is None else self.order
        rows = self.compared
        return replace(
            self,
            x_train=np.concatenate([self.x_train, self.x_validation[rows]])[order],
            y_train=np.concatenate([self.y_train, self.y_validation[rows]])[order],
            order=None,
            never_trained=None,
            x_validation=self.x_validation[:0],
            y_validation=self.y_validation[:0],
        )

    @property
    def fingerprint(self) -> str:
        """Return a digest of the stored validation and test samples, with which models are scored."""
        digest = hashlib.blake2b(digest_size=16)
        for array in (self.x_validation, self.y_validation, self.x_test, self.y_test):
            digest.update(f"{array.shape}{array.dtype.str}".encode())
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        return digest.hexdigest()

    def without_samples(self) -> "DeviceData":
        """Return a copy without any samples."""
        nothing: dict[str, Any] = {}
        for part in get_args(Part):
            x, y = self.part(part)
            nothing |= {f"x_{part}": x[:0].copy(), f"y_{part}": y[:0].copy()}
        return replace(self, never_trained=None, **nothing)

    def batch(self, part: Part, rows: Rows) -> tuple[InputArray, LabelArray]:
        """Return inputs for the model, float32 or token ids, shape (len(rows), ...), and labels, in new
        arrays.
        """
        x, y = self.part(part)
        picked = np.take(x, rows, axis=0)
        if self.ids:
            return picked.astype(np.int64), y[rows]
        inputs = as_floats(picked)
        if self.mean:
            inputs -= over_channels(self.mean, inputs.shape[1:])
        if self.std != 1:
            inputs /= over_channels(self.std, inputs.shape[1:])
        return inputs, y[rows]


def split(dataset: Dataset, test_fraction: float, validation_fraction: float) -> DeviceData:
    """Divide a device's own samples into training, validation and test.

    Samples that the source marks as test or validation keep that role. Otherwise a hash of each sample
    decides its role, so that the role never changes (see `edge_agent.datasets.train_test_split`). About
    `test_fraction` of all samples become test samples, and about `validation_fraction` of the others
    validation samples.

    Raises:
        DataError: there is no training sample or no test sample.
    """
    return _parts(dataset, *_roles(dataset, test_fraction, validation_fraction))


def num_training_samples(dataset: Dataset, test_fraction: float, validation_fraction: float) -> int:
    """Return the number of training samples that `split` would give. Raises DataError as `split`."""
    return len(_roles(dataset, test_fraction, validation_fraction)[0])


def check_source(source: str, test_fraction: float) -> Dataset:
    """Load a device's samples and check everything that does not depend on a run's model.

    Raises:
        DataError: the samples cannot be read, there is no training or no test sample, a label is negative, or
            an input is NaN or infinite.
    """
    found = load(source)
    _roles(found, test_fraction, 0.0)
    if found.y.ndim == 1 and found.y.min() < 0:
        raise DataError(f"{source}: label {found.y.min()} is negative; labels must count from 0")
    _check_finite(source, found.x, "")
    return found


def _roles(dataset: Dataset, test_fraction: float, validation_fraction: float) -> tuple[Rows, Rows, Rows]:
    """Return the indices of training, validation and test samples, each ascending. Raises DataError, see
    `split`.
    """
    for_test, for_validation = split_draws(dataset.x, dataset.y, dataset.block)
    validation = dataset.validation
    left = np.ones(len(dataset.y), np.bool_) if validation is None else ~validation
    test = _side(left, for_test, test_fraction) if dataset.test is None else dataset.test
    if validation is None:
        validation = _side(~test, for_validation, validation_fraction)
    train = ~test & ~validation
    if not train.any() or not test.any():
        raise DataError(
            f"{dataset.source}: {train.sum()} training and {test.sum()} test samples; each part needs at"
            " least"
            " one, and copies of a sample count as one"
        )
    return np.flatnonzero(train), np.flatnonzero(validation), np.flatnonzero(test)


def _side(among: NDArray[np.bool_], numbers: NDArray[np.float64], fraction: float) -> NDArray[np.bool_]:
    """Mark the samples of `among` that fall into the fraction, see `train_test_split.select_below`."""
    picked = np.zeros_like(among)
    picked[among] = select_below(numbers[among], fraction)
    return picked


def take(dataset: Dataset, train: Rows, test: Rows, validation_fraction: float, key: Key) -> DeviceData:
    """Copy one simulated device's samples.

    Args:
        dataset: samples of all devices.
        train: the device's training rows. Samples that the user marked as validation are held out of them.
        test: the device's test rows.
        validation_fraction: share of each class that is held out as validation, if the user marked none.
        key: seed of that choice.
    """
    if dataset.block is not None and dataset.validation is None:
        numbers = split_draws(dataset.x, dataset.y, dataset.block)[1]
        held_out = select_below(numbers[train], validation_fraction)
    elif dataset.validation is None or dataset.benchmark:
        held_out = stratified(dataset.strata[train], validation_fraction, key.child("validation"))
    else:
        held_out = dataset.validation[train]
    return _parts(dataset, train[~held_out], train[held_out], test)


def _parts(dataset: Dataset, train: Rows, validation: Rows, test: Rows) -> DeviceData:
    x, y = dataset.x, dataset.y
    order = np.argsort(np.concatenate([train, validation]), kind="stable") if validation.size else None
    return DeviceData(
        *(x[train], y[train], x[validation], y[validation], x[test], y[test]),
        source=dataset.source,
        order=order,
        arrays=dataset.arrays,
    )


def stratified(y: LabelArray, fraction: float, key: Key) -> NDArray[np.bool_]:
    """Pick `fraction` of the samples of each class, rounded by largest remainder.

    With two samples or more, at least one is picked (unless `fraction` is 0) and at least one is left.

    Returns:
        bool, shape (len(y),); True = picked.
    """
    picked = np.zeros(len(y), np.bool_)
    total = num_stratified(len(y), fraction)
    if not total:
        return picked
    _, classes, counts = np.unique(y, return_inverse=True, return_counts=True)
    order = key.permutation(len(y))
    by_class = np.split(order[np.argsort(classes[order], kind="stable")], np.cumsum(counts)[:-1])
    for rows, count in zip(by_class, apportion(counts, total), strict=True):
        picked[rows[:count]] = True
    return picked


def num_stratified(num_samples: int, fraction: float) -> int:
    """Return the number of samples that `stratified` picks."""
    if not fraction or num_samples < 2:
        return 0
    return min(max(1, round(fraction * num_samples)), num_samples - 1)


def apportion(shares: NDArray[np.number], total: int) -> NDArray[np.intp]:
    """Divide `total` into whole numbers in proportion to `shares`.

    The largest remainders are rounded up, and of equal ones the lower index.
    """
    exact = shares * (total / shares.sum())
    whole: NDArray[np.intp] = np.floor(exact + 1e-9).astype(np.intp)
    whole[np.argsort(whole - exact, kind="stable")[: total - whole.sum()]] += 1
    return whole


def scaled(data: DeviceData, mean: Mean, std: Std, spec: ModelSpec) -> DeviceData:
    """Return `data` with the mean and deviation of a run.

    Raises:
        SettingError: a list has another length than the number of channels.
    """
    check_channels(mean, std, spec.input_shape)
    return replace(data, mean=mean, std=std)


def check_fits(data: DeviceData, spec: ModelSpec, task: Task = CLASSIFICATION) -> DeviceData:
    """Bring `data` into the model's shape.

    Images without a channel axis get one. Byte images of shape (height, width, 1, 3 or 4) get their channels
    first. The task may convert labels. Samples that the task cannot train on are removed from training, and
    serve only for scores in validation.

    Raises:
        DataError: there are no training samples, samples have another shape, labels do not fit the task or
            the model's outputs, or inputs are NaN or infinite.
        SettingError: the number of class weights differs from the number of classes.
    """
    data = _for_task(data, spec, task)
    if not data.size("train"):
        raise DataError(f"{data.source}: no training samples; add some, or lower the test fraction")
    for part in get_args(Part):
        _check_finite(data.source, data.part(part)[0], f" in the {part} samples")
    return replace(
        data,
        x_train=_shaped(data.x_train, spec, data.source, data.arrays),
        x_validation=_shaped(data.x_validation, spec, data.source, data.arrays),
        x_test=_shaped(data.x_test, spec, data.source, data.arrays),
    )


def all_fit(dataset: Dataset, spec: ModelSpec, task: Task) -> bool:
    """True if `check_fits` accepts every sample and removes none."""
    try:
        labels = task.checked(dataset.y, spec.num_classes, dataset.source)
        _check_finite(dataset.source, dataset.x, "")
        _shaped(dataset.x, spec, dataset.source, dataset.arrays)
    except (DataError, SettingError):
        return False
    trained_on = task.trained_on(labels)
    return trained_on is None or bool(trained_on.all())


def _for_task(data: DeviceData, spec: ModelSpec, task: Task) -> DeviceData:
    labels, taken = {}, {}
    for part in get_args(Part):
        found = task.checked(data.part(part)[1], spec.num_classes, f"{data.source}, {part} samples")
        trained_on = task.trained_on(found)
        labels[part] = found
        taken[part] = np.ones(len(found), np.bool_) if trained_on is None else trained_on
    remaining = np.concatenate([taken["train"], taken["validation"]])
    return replace(
        data,
        x_train=data.x_train if taken["train"].all() else data.x_train[taken["train"]],
        y_train=labels["train"][taken["train"]],
        y_validation=labels["validation"],
        y_test=labels["test"],
        order=None if data.order is None else _order_of(remaining, data.order),
        never_trained=None if taken["validation"].all() else ~taken["validation"],
    )


def _order_of(remaining: NDArray[np.bool_], order: Rows) -> Rows:
    """Return `DeviceData.order` after all training and validation samples but the `remaining` ones are
    removed.
    """
    places: Rows = np.cumsum(remaining) - 1
    return places[order[remaining[order]]]


def _check_finite(source: str, x: Inputs, where: str) -> None:
    if x.dtype != np.uint8 and x.size and not np.isfinite([x.min(), x.max()]).all():
        raise DataError(f"{source}: NaN or infinite inputs{where}; correct or remove them")


def for_vocabulary(data: DeviceData, vocabulary: int | None) -> DeviceData:
    """Return `data` for a model with token ids below `vocabulary`; None if samples are not token ids.

    Raises:
        DataError: a sample holds something else than such ids, or the run scales samples.
    """
    if vocabulary is None:
        return data
    if (data.mean, data.std) != (0.0, 1.0):
        raise DataError(
            f"{data.source}: the model takes token ids, which cannot be scaled; leave out data.mean and"
            " data.std"
        )
    for part in get_args(Part):
        x, _ = data.part(part)
        if not x.size:
            continue
        if (np.floor(x) != x).any():
            raise DataError(f"{data.source}: fractions in the {part} samples; the model takes token ids")
        if x.min() < 0 or x.max() >= vocabulary:
            wrong = int(x.min() if x.min() < 0 else x.max())
            raise DataError(
                f"{data.source}: token id {wrong} in the {part} samples; the model knows 0..{vocabulary - 1}"
            )
    return replace(data, ids=True)


def fits_input(found: tuple[int, ...], wanted: tuple[int, ...], *, as_bytes: bool) -> bool:
    """True if `check_fits` can bring a sample of this shape into the model's."""
    if wanted in (found, (1, *found)):
        return True
    channels_last = len(found) == 3 and found[2] in (1, 3, 4) and (found[2], *found[:2]) == wanted
    return as_bytes and channels_last


def _shaped(x: Inputs, spec: ModelSpec, source: str, arrays: ArrayShapes) -> Inputs:
    found, wanted = x.shape[1:], spec.input_shape
    if spec.reads.inputs or arrays:
        _check_inputs(x, spec, source, arrays)
    if found == wanted:
        return x
    if (1, *found) == wanted:
        return x[:, None]
    if fits_input(found, wanted, as_bytes=x.dtype == np.uint8):
        return np.ascontiguousarray(np.moveaxis(x, 3, 1))
    raise DataError(f"{source}: samples have shape {found}; expected {wanted}, as the model takes")


def _without_ones(arrays: ArrayShapes) -> ArrayShapes:
    """Return the shapes without axes of one position, which do not change the order of numbers."""
    return tuple((name, tuple(size for size in shape if size != 1)) for name, shape in arrays)


def _check_inputs(x: Inputs, spec: ModelSpec, source: str, arrays: ArrayShapes) -> None:
    """Raise DataError unless samples are rows of the model's several inputs."""
    wanted = tuple((one.name, one.shape) for one in spec.reads.inputs)
    if arrays and _without_ones(arrays) != _without_ones(wanted):
        takes = f"the inputs {spec.reads}" if wanted else "a single array, x"
        raise DataError(f"{source}: it has the arrays {listed_shapes(arrays)}; the model takes {takes}")
    if x.shape[1:] != spec.input_shape:
        raise DataError(
            f"{source}: samples have shape {x.shape[1:]}; the model takes the inputs {spec.reads}: save each"
            f" as an array of its name, or rows of {spec.reads.size} numbers in this order"
        )
    if problem := spec.reads.problem(x):
        raise DataError(f"{source}: {problem}")


def save_npz(path: Path, data: DeviceData) -> None:
    """Write a device's samples so that `split(load(f"npz:{path}"), ...)` restores them.

    `mean` and `std` belong to the run and are not written.

    Raises:
        StoreError: `path` cannot be written.
    """
    arrays = {}
    if data.order is not None:
        write_npz(path, _in_order_of_source(data, data.order))
        return
    for part in get_args(Part):
        if data.size(part):
            arrays[f"x_{part}"], arrays[f"y_{part}"] = data.part(part)
    write_npz(path, arrays)


def _in_order_of_source(data: DeviceData, order: Rows) -> dict[str, NDArray[np.generic]]:
    """Return training and validation samples in the source's order, followed by the test samples."""
    whole, num_test = data.without_validation(), data.size("test")
    nobody = np.zeros(num_test, np.bool_)
    return {
        "x": np.concatenate([whole.x_train, data.x_test]),
        "y": np.concatenate([whole.y_train, data.y_test]),
        "validation": np.concatenate([order >= data.size("train"), nobody]),
        "test": np.repeat([False, True], [order.size, num_test]),
    }
