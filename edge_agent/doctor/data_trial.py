"""Reads the first samples of a source as `edge-agent run` would, and describes them and what is refused."""

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetune.edge_agent.datasets.dataset import Dataset
from fleetune.edge_agent.stream.sample import UNLABELLED, Label
from fleetune.edge_agent.stream.sample_store import SampleStore
from fleetune.edge_agent.stream.sample_stream import (
    StreamSettings,
    is_stream,
    open_stream,
    stream_columns,
    without_password,
)
from fleetune.edge_agent.stream.status import status
from fleetune.edge_agent.training.device_data import check_source, split

MAX_SAMPLES = 100  # of a stream
SHOWN = 3
_SHOWN_NUMBERS = 1000
_MAX_COLUMNS = 100
_TIMES = frozenset({"t", "ts", "time", "timestamp", "datetime", "date", "epoch"})


@dataclass(frozen=True)
class ColumnStatistics:
    """Statistics of an input column, or of all inputs, over the samples."""

    name: str
    mean: float
    std: float
    min: float
    max: float


@dataclass(frozen=True)
class Trial:
    """The first samples of a source.

    Attributes:
        source: the source, without password.
        stream: True if samples arrive while the agent runs; then these are the first ones.
        num_samples: number of samples.
        shape: shape of one sample.
        dtype: type of the inputs.
        labels: what the labels are.
        train, test: samples to train on and to test on.
        columns: statistics of the input columns.
        first: input and label of the first samples; long inputs are cut.
        refused: count and last message of refused samples, files and messages, by kind.
        hints: what may be wrong.
    """

    source: str
    stream: bool
    num_samples: int
    shape: tuple[int, ...]
    dtype: str
    labels: str
    train: int
    test: int
    columns: tuple[ColumnStatistics, ...]
    first: tuple[dict[str, Any], ...]
    refused: dict[str, tuple[int, str]]
    hints: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the trial as plain values, for JSON."""
        refusals = {kind: {"count": count, "last": last} for kind, (count, last) in self.refused.items()}
        return {**asdict(self), "refused": refusals}


def try_source(
    source: str,
    labels: tuple[str, ...],
    test_fraction: float,
    seconds: float,
    max_samples: int = MAX_SAMPLES,
) -> Trial:
    """Read a source: a whole data set, or the first samples of a stream.

    Args:
        source: value of `--data`.
        labels: names of the label columns of tables.
        test_fraction: share of the samples that is held out for testing.
        seconds: longest time to wait for samples of a stream.
        max_samples: about so many samples of a stream are read.

    Raises:
        DataError: the source is wrong, or `edge-agent run` would stop with its data.
    """
    if not is_stream(source):
        found = check_source(source, test_fraction)
        parts = split(found, test_fraction, 0.0)
        sizes = parts.size("train"), parts.size("test")
        return _described(source, found.x, _labels_of(found), found.columns, *sizes)
    with tempfile.TemporaryDirectory(prefix="fleetune-try-") as folder:
        return _try_stream(source, Path(folder), labels, test_fraction, seconds, max_samples)


def _labels_of(found: Dataset) -> list[Any]:
    return found.y.tolist() if found.y.ndim == 1 or found.y.shape[1] else [None] * len(found.y)


def _try_stream(
    source: str, folder: Path, labels: tuple[str, ...], test_fraction: float, seconds: float, max_samples: int
) -> Trial:
    stream = open_stream(folder / "samples.sqlite", source, StreamSettings(labels=labels, trial=True))
    store = stream.store
    try:
        stream.try_out(lambda: _count(store) >= max_samples, seconds)
        store.save_counts()
        rows, table, refusals = _stored(store), store.table_columns(), status(store, test_fraction).refused
    finally:
        stream.close()
    shape = rows[0][0].shape if rows else ()
    alike = [one for one in rows if one[0].shape == shape]
    x = np.stack([one[0] for one in alike]) if alike else np.zeros((0, 0), np.float32)
    names = (table.columns if table is not None else ()) or stream_columns(source)
    num_test = sum(one[2] < test_fraction for one in alike)
    found = _described(
        without_password(source), x, [one[1] for one in alike], names, len(alike) - num_test, num_test
    )
    hints = found.hints
    if alike and not (found.train and found.test):
        one_role = "these samples are only to train on, or only to test on, but a device needs both"
        hints += (
            f"{one_role}; a smaller block= helps, because windows of a block that overlap stay together",
        )
    if len(alike) < len(rows):
        hints += (f"{len(rows) - len(alike)} of {len(rows)} samples have another shape than the first",)
    return Trial(**{**vars(found), "stream": True, "refused": refusals, "hints": hints})


def _count(store: SampleStore) -> int:
    with store.reading() as connection:
        return int(connection.execute("SELECT count(*) FROM sample").fetchone()[0])


def _stored(store: SampleStore) -> list[tuple[NDArray[Any], Any, float]]:
    """Return input, label and test draw of the stored samples, in the order of their arrival."""
    query = (
        "SELECT dtype, shape, x, class, y, for_test FROM sample JOIN input USING (number)"
        " JOIN form ON form.number = form ORDER BY sample.number LIMIT ?"
    )
    found = []
    with store.reading() as connection:
        for dtype, shape, data, class_number, y, for_test in connection.execute(query, (MAX_SAMPLES,)):
            x = np.frombuffer(data, dtype).reshape([int(one) for one in shape.split()])
            label = None if class_number == UNLABELLED else Label.read(class_number, y).y.tolist()
            found.append((x, label, for_test))
    return found


def _described(
    source: str, x: NDArray[Any], labels: list[Any], names: Sequence[str], train: int, test: int
) -> Trial:
    shown = range(min(SHOWN, len(x)))
    first = tuple(
        {"x": x[place].tolist() if x[place].size <= _SHOWN_NUMBERS else _cut(x[place]), "y": labels[place]}
        for place in shown
    )
    hints = [
        f"the column {name} looks like a time: time={name} takes it out of the input and finds gaps"
        for name in names
        if name.lower() in _TIMES
    ]
    return Trial(
        source, stream=False, num_samples=len(x), shape=x.shape[1:], dtype=str(x.dtype),
        labels=_label_words(labels), train=train, test=test, columns=_statistics(x, names), first=first,
        refused={}, hints=tuple(hints),
    )  # fmt: skip


def _cut(x: NDArray[Any]) -> list[Any]:
    return [*x.reshape(-1)[:_SHOWN_NUMBERS].tolist(), "..."]


def _statistics(x: NDArray[Any], names: Sequence[str]) -> tuple[ColumnStatistics, ...]:
    if not x.size:
        return ()
    columns = {"all": x}
    if len(names) == x.shape[1] <= _MAX_COLUMNS:
        columns = {name: x[:, place] for place, name in enumerate(names)}
    return tuple(
        ColumnStatistics(
            name, *(float(of(one.astype(np.float64))) for of in (np.mean, np.std, np.min, np.max))
        )
        for name, one in columns.items()
    )


def _label_words(labels: list[Any]) -> str:
    known = [one for one in labels if one is not None]
    if not known:
        return "no labels"
    missing = f"; {len(labels) - len(known)} have no label" if len(known) < len(labels) else ""
    if isinstance(known[0], int):
        classes, counts = np.unique([one for one in known if isinstance(one, int)], return_counts=True)
        each = ", ".join(f"{number}: {count}" for number, count in zip(classes, counts, strict=True))
        return f"classes {each}{missing}" if len(classes) <= 20 else f"{len(classes)} classes{missing}"
    return f"labels of {np.size(known[0])} numbers, {np.min(known):g} to {np.max(known):g}{missing}"
