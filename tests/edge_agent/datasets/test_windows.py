"""Windows of a series: the same whatever portions its rows come in, and none across a gap."""

from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetune.edge_agent.datasets.series_options import SeriesOptions
from fleetune.edge_agent.datasets.windows import MAX_LATE, Rows, Series, SeriesState


def rows_of(times, x=None, refused=()):
    times = np.array(times, np.float64)
    x = np.array(times if x is None else x, np.float32).reshape(len(times), -1)
    return Rows(times, x, x[:, :1].astype(np.float64), np.isin(np.arange(len(times)), refused))


def cut(options, portions):
    """All windows as (block, x, y), through a state that is stored after each portion."""
    state, found = None, []
    for rows in portions:
        series = Series(options, rows.x.shape[1], rows.y.shape[1], state)
        for windows in series.push(rows):
            found += [
                (windows.block, x.tobytes(), y.tobytes()) for x, y in zip(windows.x, windows.y, strict=True)
            ]
        stored = msgspec.msgpack.encode(series.saved())
        state = msgspec.msgpack.decode(stored, type=SeriesState)
    return found


def firsts(options, rows):
    return [np.frombuffer(x, np.float32).tolist() for _, x, _ in cut(options, [rows])]


PASSED = st.sampled_from([-1, 0, 1, 2, 9])
NUMBERS = st.floats(-5, 5, width=32) | st.just(float("nan"))


@given(
    st.lists(
        st.tuples(st.sampled_from([-1, 0, 1, 2, 9]), NUMBERS, NUMBERS, st.booleans()), min_size=1, max_size=40
    ),
    st.lists(st.integers(0, 40), max_size=6),
    st.integers(1, 4),
    st.integers(0, 2),
    st.integers(1, 6),
    st.integers(0, 9),
    st.sampled_from(["gap", "hold"]),
)
def test_portions_change_no_window(drawn, ends, window, horizon, step, more, missing):
    options = SeriesOptions(
        window=window, horizon=horizon, step=step, block=window + horizon + more, gap="3", missing=missing
    )
    passed, *columns = [np.array([row[place] for row in drawn]) for place in range(3)]
    refused = [place for place, row in enumerate(drawn) if row[3] and row[0] == 0]
    rows = rows_of(np.cumsum(passed), np.array(columns).T, refused)
    places = [0, *sorted(min(one, len(rows)) for one in ends), len(rows)]
    portions = [rows[first:end] for first, end in pairwise(places)]
    assert cut(options, portions) == cut(options, [rows])


def test_no_window_crosses_a_gap_a_step_back_a_refused_row_or_a_block():
    options = SeriesOptions(window=3, gap="2", block=100)
    assert firsts(options, rows_of([0, 1, 2, 4, 7, 8, 9])) == [[0, 1, 2], [1, 2, 4], [7, 8, 9]]
    assert firsts(options, rows_of([5, 6, 1, 2, 3])) == [[1, 2, 3]]
    assert firsts(options, rows_of([0, 1, 2, 3, 4, 5], refused=[2])) == [[3, 4, 5]]
    blocks = SeriesOptions(window=2, gap="2", block=3)
    assert firsts(blocks, rows_of([0, 1, 2, 3, 4, 5])) == [[0, 1], [1, 2], [3, 4], [4, 5]]
    apart = SeriesOptions(window=2, step=3, gap="2")
    assert firsts(apart, rows_of(range(9))) == [[0, 1], [3, 4], [6, 7]]


def test_what_is_missing_is_a_gap_or_held_for_one_window():
    nan = float("nan")
    x = [1, nan, nan, nan, 5, 6, nan]
    assert firsts(SeriesOptions(window=2, missing="gap"), rows_of(range(7), x)) == [[5, 6]]
    assert firsts(SeriesOptions(window=2, missing="hold"), rows_of(range(7), x)) == [
        [1, 1], [1, 1], [5, 6], [6, 6],
    ]  # fmt: skip
    held = rows_of([0, 1, 9, 10], [1, nan, nan, 4])
    assert firsts(SeriesOptions(window=2, missing="hold", gap="3"), held) == [[1, 1]]


def messages(options, times, x=None):
    series, found, problems = Series(options, 1, 0), [], []
    for time, value in zip(times, x or times, strict=True):
        row = rows_of([time], [value])
        windows, problem = series.insert(Rows(row.time, row.x, row.y[:, :0], row.refused))
        found += [one.tolist() for made in windows for one in made.x[:, 0]]
        problems += [problem] * bool(problem)
    return found, problems


def test_a_message_that_comes_twice_or_late():
    options = SeriesOptions(window=3, step=3, gap="2")
    assert messages(options, [0, 1, 1, 2, 2, 2, 3, 4, 5]) == ([[0, 1, 2], [3, 4, 5]], [])
    assert messages(options, [0, 2, 1, 3, 4, 5]) == ([[0, 1, 2], [3, 4, 5]], [])
    assert messages(options, [3, 4, 1, 5]) == ([[3, 4, 5]], ["late"])
    assert messages(options, [0, 0, 0], [7, 8, 9]) == ([[7, 8, 9]], [])  # a clock of whole seconds
    assert messages(options, [0, 1, 5, 2, 6, 7]) == ([[5, 6, 7]], ["late"])  # nothing fills a gap afterwards


def test_a_clock_that_was_set_back_ends_the_waiting():
    found, problems = messages(SeriesOptions(window=3, step=3, gap="2"), [1000, *range(MAX_LATE + 2)])
    assert found == [[MAX_LATE - 1, MAX_LATE, MAX_LATE + 1]]
    assert problems == ["late"] * (MAX_LATE - 1)


@pytest.mark.parametrize("horizon", [0, 2])
def test_the_label_is_of_the_last_row_or_of_the_horizon(horizon):
    (windows,) = Series(SeriesOptions(window=3, horizon=horizon, label="y", step=2), 1, 1).push(
        rows_of(range(7))
    )
    assert windows.x[:, 0].tolist() == [[0, 1, 2], [2, 3, 4], [4, 5, 6]][: len(windows.x)]
    assert windows.y.tolist() == ([[3, 4], [5, 6]] if horizon else [[2], [4], [6]])
