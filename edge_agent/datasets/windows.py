"""Cuts a series of rows into windows. No window crosses a gap, a row that is left out, or a block's end.

A series is a file, a group in a file, or a topic. Rows come in any portions: a whole file at once, or one
message after the other. The windows are the same. Between two portions, a `SeriesState` holds everything that
the next windows need.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from fleetune.edge_agent.datasets.series_options import SeriesOptions

MAX_LATE = 8  # so many late rows in succession: the clock was set


@dataclass(frozen=True)
class Rows:
    """Rows of one series.

    Attributes:
        time: time of each row, float64, shape (n,); NaN if it is unknown.
        x: inputs, float32, shape (n, columns); NaN where a value is missing.
        y: labels, float64, shape (n, labels); NaN where a label is missing.
        refused: True where a row is refused, shape (n,).
    """

    time: NDArray[np.float64]
    x: NDArray[np.float32]
    y: NDArray[np.float64]
    refused: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, chosen: Any) -> "Rows":
        return Rows(self.time[chosen], self.x[chosen], self.y[chosen], self.refused[chosen])


@dataclass(frozen=True)
class Windows:
    """Windows of one block.

    Attributes:
        x: inputs, float32, shape (n, columns, window), time last, for convolutions.
        y: labels, float64: of the window's last row, shape (n, labels), or of its horizon, shape (n, horizon
            times labels). NaN where a label is missing.
        block: number of the block in its series.
    """

    x: NDArray[np.float32]
    y: NDArray[np.float64]
    block: int


class SeriesState(Struct, array_like=True):
    """What a series holds between two portions of rows.

    Attributes:
        time, x, y: rows that the next window begins with, as bytes: float64, float32, float64.
        last: time of the last row.
        skip: rows to pass over before the next window begins.
        lost: True if the last row was left out.
        count: rows in the present block.
        block: number of the present block.
        tail: input of the last row, float32.
        held: last known value of each column, float32; ages: rows since then, int64. Empty at the beginning.
        late: number of late rows in succession.
        draws: number of the latest block with a window, and its draws for the split; None without one.
    """

    time: bytes = b""
    x: bytes = b""
    y: bytes = b""
    last: float = math.nan
    skip: int = 0
    lost: bool = False
    count: int = 0
    block: int = 0
    tail: bytes = b""
    held: bytes = b""
    ages: bytes = b""
    late: int = 0
    draws: tuple[int, float, float] | None = None


class Series:
    """Cuts one series into windows.

    Args:
        options: length and distance of the windows.
        num_columns: number of input columns.
        num_labels: number of label columns.
        state: state of an earlier `Series`; None begins anew.
    """

    def __init__(
        self, options: SeriesOptions, num_columns: int, num_labels: int, state: SeriesState | None = None
    ) -> None:
        self._options, self.state = options, SeriesState() if state is None else state
        held = self.state
        x = np.frombuffer(held.x, np.float32).reshape(-1, num_columns)
        y = np.frombuffer(held.y).reshape(len(x), num_labels)
        self._rows = Rows(np.frombuffer(held.time), x, y, np.zeros(len(x), np.bool_))

    def saved(self) -> SeriesState:
        """Return the state, to go on later."""
        rows, state = self._rows, self.state
        state.time, state.x, state.y = rows.time.tobytes(), rows.x.tobytes(), rows.y.tobytes()
        return state

    def push(self, rows: Rows) -> list[Windows]:
        """Append rows in order of time, and return the windows that are complete now.

        Where time goes back, or forward by more than the gap, a window ends and a new one begins.
        """
        if not len(rows):
            return []
        state, options, usable = self.state, self._options, ~rows.refused
        fresh = np.concatenate([[state.lost], rows.refused[:-1]])[usable]
        state.lost, rows = bool(rows.refused[-1]), rows[usable]
        if not len(rows):
            return []
        fresh |= self._breaks(rows.time)
        x = self._hold(rows.x, fresh) if options.missing == "hold" else rows.x
        lost = np.asarray(np.isnan(x).any(axis=1))
        if options.horizon:
            lost |= np.isnan(rows.y).any(axis=1)
        fresh[1:] |= lost[:-1]
        state.last, state.lost, state.tail = (
            float(rows.time[-1]),
            state.lost or bool(lost[-1]),
            x[-1].tobytes(),
        )
        kept = Rows(rows.time, x, rows.y, lost)[~lost]
        begins = [*np.flatnonzero(fresh[~lost])]
        found = []
        for place, (first, end) in enumerate(pairwise([0, *begins, len(kept)])):
            if place:
                self.begin()
            found += self._extend(kept[first:end])
        return found

    def insert(self, rows: Rows) -> tuple[list[Windows], str]:
        """Append one row that may come late or twice, as messages do.

        A late row takes its place in the window that is not complete yet. A row that comes twice is ignored.

        Returns:
            Windows that are complete now; and what was wrong with the row, empty if nothing.
        """
        state, held, time = self.state, self._rows, float(rows.time[0])
        if self._has(rows):
            return [], ""
        if not time < state.last:
            state.late = 0
            return self.push(rows), ""
        if len(held) and held.time[0] < time and not np.isnan(rows.x).any():
            place = int(np.searchsorted(held.time, time, "right"))
            self._rows = held[:place]
            self._append(rows)
            self._append(held[place:])
            state.count += 1
            return self._complete(), ""
        state.late += 1
        if state.late < MAX_LATE:
            return [], "late"
        state.late = 0
        return self.push(rows), ""

    def begin(self) -> None:
        """Begin a new window: the next rows do not follow the last ones."""
        self._rows, self.state.skip = self._rows[:0], 0

    def _has(self, rows: Rows) -> bool:
        if rows.time[0] == self.state.last and rows.x[0].tobytes() == self.state.tail:
            return True
        same = self._rows.time == rows.time[0]
        return bool((self._rows.x[same] == rows.x[0]).all(axis=1).any())

    def _breaks(self, time: NDArray[np.float64]) -> NDArray[np.bool_]:
        passed = np.diff(time, prepend=self.state.last)
        found: NDArray[np.bool_] = (passed < 0) | (passed > self._options.longest_gap)
        return found

    def _hold(self, x: NDArray[np.float32], fresh: NDArray[np.bool_]) -> NDArray[np.float32]:
        """Return inputs with missing values filled: with the last value of the column since the last gap."""
        state, order = self.state, np.arange(1, len(x) + 1)[:, None]
        held = (
            np.frombuffer(state.held, np.float32) if state.held else np.full(x.shape[1], np.nan, np.float32)
        )
        ages = np.frombuffer(state.ages, np.int64) if state.ages else np.zeros(x.shape[1], np.int64)
        before = np.concatenate([held[None], x])
        since = np.maximum.accumulate(np.where(fresh[:, None], order, 0), axis=0)
        known = np.where(np.isnan(x), -self._options.window - 1, order)
        latest = np.maximum.accumulate(
            np.concatenate([np.where(np.isnan(held), -(2**40), -ages)[None], known])
        )
        places, usable = np.maximum(latest[1:], 0), latest[1:] >= np.where(since, since, -(2**40))
        usable &= order - latest[1:] <= self._options.window
        filled = np.where(usable, np.take_along_axis(before, places, axis=0), np.float32(np.nan))
        if len(x):
            ages = (order - latest[1:])[-1]
            state.held, state.ages = filled[-1].astype(np.float32).tobytes(), ages.astype(np.int64).tobytes()
        return filled.astype(np.float32)

    def _extend(self, rows: Rows) -> list[Windows]:
        """Append rows that follow each other; blocks end in between."""
        found, state, block_rows = [], self.state, self._options.block_rows
        while len(rows):
            room = block_rows - state.count
            self._append(rows[:room])
            state.count += len(rows[:room])
            found += self._complete()
            rows = rows[room:]
        return found

    def _append(self, rows: Rows) -> None:
        pairs = zip(vars(self._rows).values(), vars(rows).values(), strict=True)
        self._rows = Rows(*(np.concatenate(pair) for pair in pairs))

    def _complete(self) -> list[Windows]:
        """Take the complete windows from the rows."""
        options, state = self._options, self.state
        passed = min(state.skip, len(self._rows))
        rows, state.skip = self._rows[passed:], state.skip - passed
        num = max(0, (len(rows) - options.length) // options.step + 1)
        found = [self._cut(rows, num)] if num else []
        nxt = num * options.step
        self._rows, state.skip = rows[nxt:], state.skip + max(0, nxt - len(rows))
        if state.count >= options.block_rows:
            self.begin()
            state.count, state.block = 0, state.block + 1
        return found

    def _cut(self, rows: Rows, num: int) -> Windows:
        options = self._options
        x = sliding_window_view(rows.x, options.window, axis=0)[:: options.step][:num]
        if not options.horizon:
            return Windows(x, rows.y[options.window - 1 :: options.step][:num], self.state.block)
        following = sliding_window_view(rows.y[options.window :], options.horizon, axis=0)
        y = np.moveaxis(following[:: options.step][:num], 2, 1).reshape(num, -1)
        return Windows(x, y, self.state.block)
