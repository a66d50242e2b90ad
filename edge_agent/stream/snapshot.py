"""The samples of a store as they stood after one of its changes: what a round trains and is tested on."""

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fleetune.edge_agent.stream import values
from fleetune.edge_agent.stream.sample import NUMBERS, UNLABELLED, Label
from fleetune.edge_agent.stream.sample_store import SampleStore

Part = Literal["train", "validation", "test"]
PARTS: tuple[Part, ...] = ("train", "validation", "test")
Arrays = tuple[NDArray[np.generic], NDArray[np.generic]]

_COUNTS = "added <= :change AND (dropped IS NULL OR dropped > :change)"
_FETCHED = 256


@dataclass(frozen=True)
class Wanted:
    """What a model takes of the store.

    Attributes:
        fits: whether inputs of this dtype (`"|u1"` or `"<f4"`) and shape do.
        labels: classes, int64 (n,); numbers, float32 (n, k); or none are needed, and samples without one are
            taken too.
        size: how many classes there are, or how many numbers are in a label; None: any.
        test_fraction, validation_fraction: see `datasets.sample_roles`: a sample is tested on whose number
            is below the first, validated on of the others whose other number is below the second.
    """

    fits: Callable[[str, tuple[int, ...]], bool]
    labels: Literal["classes", "numbers", "none"] = "classes"
    size: int | None = None
    test_fraction: float = 0.3
    validation_fraction: float = 0.0


@dataclass(frozen=True)
class Counted:
    """How many samples a snapshot has.

    Attributes:
        parts: of each part.
        new: of the training samples, those that came or were labelled since the last training.
        unlabelled: that wait for a label.
        unfit: of another shape, or with a label that the model has no place for.
    """

    parts: dict[Part, int]
    new: int
    unlabelled: int
    unfit: int


@dataclass(frozen=True)
class _Row:
    number: int
    part: Part
    form: int
    label: NDArray[np.generic]


@dataclass(frozen=True)
class _Form:
    dtype: str
    shape: tuple[int, ...]


def count(store: SampleStore, wanted: Wanted, change: int | None = None) -> Counted:
    """How many samples there are after a change; None: now.

    Raises:
        StoreError: the store cannot be read.
    """
    with store.reading() as connection:
        return _counted(connection, wanted, store.change if change is None else change, [])


def read(store: SampleStore, wanted: Wanted, change: int) -> tuple[dict[Part, Arrays], Counted]:
    """The samples after a change, in the order in which they came; nothing is in memory twice.

    Returns:
        Inputs and labels of each part: uint8 or float32, shape (n, ...), and labels as `wanted`. Inputs of
        several shapes that fit keep that of most of them.

    Raises:
        StoreError: the store cannot be read.
    """
    with store.reading() as connection:
        rows: list[_Row] = []
        counted = _counted(connection, wanted, change, rows)
        forms = _forms(connection, wanted, change)
        taken = [forms[number] for number in {row.form for row in rows}]
        as_bytes = all(form.dtype == "|u1" for form in taken)
        shape, dtype = taken[0].shape if taken else (), np.uint8 if as_bytes and taken else np.float32
        empty = np.empty((0, *shape), dtype)
        labels = _no_labels(wanted, rows)
        return {
            part: _part(connection, [row for row in rows if row.part == part], forms, (empty, labels))
            for part in PARTS
        }, counted


def _counted(connection: sqlite3.Connection, wanted: Wanted, change: int, rows: list[_Row]) -> Counted:
    """Count; the rows that are taken are added to `rows`, in the order in which they came."""
    forms, size = _forms(connection, wanted, change), wanted.size
    trained = values.get_number(connection, "trained")
    parts, new, unlabelled, unfit = dict.fromkeys(PARTS, 0), 0, 0, 0
    query = f"""
        SELECT s.number, form, for_test, for_validation, changed,
            CASE WHEN changed > :change AND b.number IS NOT NULL THEN b.class ELSE s.class END,
            CASE WHEN changed > :change AND b.number IS NOT NULL THEN b.y ELSE s.y END
        FROM sample s LEFT JOIN label_before b USING (number) WHERE {_COUNTS} ORDER BY s.number
    """  # noqa: S608 - words of our own
    for number, form, for_test, for_validation, changed, class_number, y in connection.execute(
        query, {"change": change}
    ):
        if class_number == UNLABELLED and wanted.labels != "none":
            unlabelled += 1
            continue
        label = _label(wanted.labels, size, class_number, y)
        if form not in forms or label is None:
            unfit += 1
            continue
        if wanted.labels == "numbers":
            size = label.size  # where the model does not say, the first label does
        part = _part_of(wanted, for_test, for_validation)
        parts[part] += 1
        new += changed > trained and part == "train"
        rows.append(_Row(number, part, form, label))
    return Counted(parts, new, unlabelled, unfit)


def _forms(connection: sqlite3.Connection, wanted: Wanted, change: int) -> dict[int, _Form]:
    """The forms that are taken: of one shape, that of most samples, in either dtype."""
    query = f"""
        SELECT form.number, dtype, shape, count(*) FROM sample JOIN form ON form.number = form
        WHERE {_COUNTS} GROUP BY form.number ORDER BY form.number
    """  # noqa: S608 - words of our own
    found: dict[str, tuple[int, dict[int, _Form]]] = {}
    for number, dtype, text, many in connection.execute(query, {"change": change}):
        shape = tuple(map(int, text.split()))
        if wanted.fits(dtype, shape):
            known, forms = found.get(text, (0, {}))
            found[text] = known + many, {**forms, number: _Form(dtype, shape)}
    return max(found.values(), key=lambda one: one[0], default=(0, {}))[1]


def _part_of(wanted: Wanted, for_test: float, for_validation: float) -> Part:
    if for_test < wanted.test_fraction:
        return "test"
    return "validation" if for_validation < wanted.validation_fraction else "train"


def _label(kind: str, size: int | None, class_number: int, y: bytes | None) -> NDArray[np.generic] | None:
    """The label as it is wanted; None: it does not fit."""
    if kind == "none":
        return np.zeros(0, np.float32)
    label = Label.read(class_number, y or b"").y
    if kind == "numbers":
        numbers = np.atleast_1d(label).astype(np.float32)
        return numbers if size in (None, numbers.size) else None
    return label if class_number != NUMBERS and (size is None or class_number < size) else None


def _no_labels(wanted: Wanted, rows: list[_Row]) -> NDArray[np.generic]:
    """Of no samples, in the shape and dtype of theirs."""
    if wanted.labels == "classes":
        return np.zeros(0, np.int64)
    return np.zeros((0, rows[0].label.size if rows else wanted.size or 0), np.float32)


def _part(connection: sqlite3.Connection, rows: list[_Row], forms: dict[int, _Form], empty: Arrays) -> Arrays:
    """Inputs and labels of these rows; where some inputs are float32, bytes become what the model sees."""
    if not rows:
        return empty
    x = np.empty((len(rows), *empty[0].shape[1:]), empty[0].dtype)
    for start in range(0, len(rows), _FETCHED):
        some = rows[start : start + _FETCHED]
        query = f"SELECT x FROM input WHERE number IN ({', '.join('?' * len(some))}) ORDER BY number"  # noqa: S608
        found = connection.execute(query, [row.number for row in some])
        for place, (row, (data,)) in enumerate(zip(some, found, strict=True), start):
            form = forms[row.form]
            one = np.frombuffer(data, form.dtype).reshape(form.shape)
            x[place] = one / np.float32(255) if one.dtype != x.dtype else one
    return x, np.stack([row.label for row in rows])
