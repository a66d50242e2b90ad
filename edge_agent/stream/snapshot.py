"""Snapshots: the samples of a store after one of its changes; a round trains and tests on a snapshot."""

import sqlite3
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetune.edge_agent.stream import store_values
from fleetune.edge_agent.stream.sample import NUMBERS, UNLABELLED
from fleetune.edge_agent.stream.sample_requirements import PARTS, Part, SampleRequirements
from fleetune.edge_agent.stream.sample_store import SampleStore

Arrays = tuple[NDArray[np.generic], NDArray[np.generic]]

_COUNTS = "added <= :change AND (dropped IS NULL OR dropped > :change)"
_FETCHED = 256


@dataclass(frozen=True)
class SnapshotCounts:
    """Numbers of samples in a snapshot.

    Attributes:
        parts: number of samples in each part of the split.
        new: number of training samples that arrived or were labelled since the last training.
        unlabelled: number of samples without a label.
        unfit: number of samples with another shape, or with a label that the model does not have.
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


def read(
    store: SampleStore,
    requirements: SampleRequirements,
    change: int,
    *,
    newer_than: int = -1,
    max_samples: int = 2**62,
) -> tuple[dict[Part, Arrays], SnapshotCounts]:
    """Read the samples after a change, in order of arrival. No sample is in memory twice.

    Args:
        store: the store.
        requirements: what the model requires of samples.
        change: number of the change.
        newer_than: only samples that arrived, or got their label, after this change.
        max_samples: at most this many of them, the newest.

    Returns:
        Inputs and labels of each part, and the counts. Inputs are uint8 or float32, shape (n, ...). If inputs
        of several shapes fit, those of the most common shape are read. Labels have the required form.

    Raises:
        StoreError: the store cannot be read.
    """
    with store.reading() as connection:
        rows: list[_Row] = []
        counted = _counted(connection, requirements, change, rows, newer_than)
        rows = rows[-max_samples:]
        forms = _forms(connection, requirements, change)
        taken = [forms[number] for number in {row.form for row in rows}]
        as_bytes = all(form.dtype == "|u1" for form in taken)
        shape, dtype = taken[0].shape if taken else (), np.uint8 if as_bytes and taken else np.float32
        empty = np.empty((0, *shape), dtype)
        labels = _no_labels(requirements, rows)
        return {
            part: _part(connection, [row for row in rows if row.part == part], forms, (empty, labels))
            for part in PARTS
        }, counted


def _counted(
    connection: sqlite3.Connection,
    requirements: SampleRequirements,
    change: int,
    rows: list[_Row],
    newer_than: int = -1,
) -> SnapshotCounts:
    """Count the samples, and append those that are used to `rows`, in order of arrival."""
    forms, size, of_class = _forms(connection, requirements, change), None, dict[int, Any]()
    trained = store_values.get_number(connection, "trained")
    parts, new, unlabelled, unfit = dict.fromkeys(PARTS, 0), 0, 0, 0
    query = f"""
        SELECT s.number, form, for_test, for_validation, changed,
            CASE WHEN changed > :change AND b.number IS NOT NULL THEN b.class ELSE s.class END,
            CASE WHEN changed > :change AND b.number IS NOT NULL THEN b.y ELSE s.y END
        FROM sample s LEFT JOIN label_before b USING (number)
        WHERE {_COUNTS} AND changed > :newer_than ORDER BY s.number
    """  # noqa: S608 - words of our own
    for number, form, for_test, for_validation, changed, class_number, y in connection.execute(
        query, {"change": change, "newer_than": newer_than}
    ):
        if class_number == UNLABELLED and requirements.labels != "optional":
            unlabelled += 1
            continue
        if class_number not in of_class:
            of_class[class_number] = requirements.label(class_number, y)
        label = requirements.label(class_number, y) if class_number == NUMBERS else of_class[class_number]
        if form not in forms or label is None or size not in (None, label.size):
            unfit += 1
            continue
        size = label.size  # the first label sets the size if the model does not
        part = requirements.part(for_test, for_validation)
        parts[part] += 1
        new += changed > trained and part == "train"
        rows.append(_Row(number, part, form, label))
    return SnapshotCounts(parts, new, unlabelled, unfit)


def _forms(connection: sqlite3.Connection, requirements: SampleRequirements, change: int) -> dict[int, _Form]:
    """Return the forms (dtype and shape) that are used: the most common shape that fits, in either dtype."""
    query = f"""
        SELECT form.number, dtype, shape, count(*) FROM sample JOIN form ON form.number = form
        WHERE {_COUNTS} GROUP BY form.number ORDER BY form.number
    """  # noqa: S608 - words of our own
    found: dict[str, tuple[int, dict[int, _Form]]] = {}
    for number, dtype, text, many in connection.execute(query, {"change": change}):
        shape = tuple(map(int, text.split()))
        if requirements.fits(dtype, shape):
            known, forms = found.get(text, (0, {}))
            found[text] = known + many, {**forms, number: _Form(dtype, shape)}
    return max(found.values(), key=lambda one: one[0], default=(0, {}))[1]


def _no_labels(requirements: SampleRequirements, rows: list[_Row]) -> NDArray[np.generic]:
    """Return an empty array of labels, with the shape and dtype of the rows' labels."""
    if requirements.labels != "numbers":
        return np.zeros(0, np.int64)
    return np.zeros((0, rows[0].label.size if rows else 0), np.float32)


def _part(connection: sqlite3.Connection, rows: list[_Row], forms: dict[int, _Form], empty: Arrays) -> Arrays:
    """Return inputs and labels of these rows. If some inputs are float32, uint8 inputs are scaled to 0..1."""
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


def count_training_samples(
    store: SampleStore, requirements: SampleRequirements, newer_than: int | None = None
) -> tuple[int, int]:
    """Count the training samples, and how many of them are new, without looking at labels one by one.

    Where some samples do not fit the model, the counts are too high.

    Args:
        store: the store.
        requirements: what the model requires of samples.
        newer_than: samples that changed after this change are new; None means after the last training.

    Raises:
        StoreError: the store cannot be read.
    """
    with store.reading() as connection:
        change, since = store_values.get_number(connection, "change"), newer_than
        since = store_values.get_number(connection, "trained") if since is None else since
        numbers = ", ".join(map(str, _forms(connection, requirements, change)))
        kinds = dict.fromkeys(("classes", "numbers"), f"class <> {UNLABELLED}") | {"optional": "TRUE"}
        query = f"""
            SELECT count(*), coalesce(sum(changed > ?), 0) FROM sample
            WHERE dropped IS NULL AND form IN ({numbers}) AND {kinds[requirements.labels]}
                AND for_test >= ? AND for_validation >= ?
        """  # noqa: S608 - numbers and words of our own
        values = since, requirements.test_fraction, requirements.validation_fraction
        num_samples, new_samples = connection.execute(query, values).fetchone()
    return num_samples, new_samples
