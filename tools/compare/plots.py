"""Draws the pictures of a comparison: scores by round, bytes, time and setting, and by device."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from fleetune.coordinator.metrics import readable
from fleetune.coordinator.metrics.metric import titled, unit_of
from fleetune.coordinator.metrics.personal_scores import better_by, personal
from fleetune.coordinator.metrics.registry import AFTER, PERSONAL_MEAN
from fleetune.coordinator.reports.pictures import theme
from fleetune.coordinator.reports.pictures.plots import Look, devices_plot, end_label, looks_of, score_plot
from fleetune.coordinator.reports.pictures.theme import Curve, blank
from fleetune.tools.compare.comparison import Comparison, as_text, spread
from fleetune.tools.compare.finished_run import FinishedRun, Point

SENDS_NO_MODEL = 0.01  # a method below this share of a whole model's bytes sends no model
LOG_FROM = 12  # ratio of the longest to the shortest curve from which the axis is logarithmic
NAMED_VALUES = 12  # with more values than these, a setting has a numeric axis without a line
WIDE = 20  # ratio of the largest to the smallest value from which the axis is logarithmic

Looks = Mapping[str, Look]


@dataclass(frozen=True)
class History:
    """The score of a configuration by round, mean over seeds.

    Attributes:
        x: horizontal position of each round, mean over seeds.
        y: the score (a share in percent).
        within: standard deviation of the score over seeds; 0 with one seed.
    """

    x: list[float]
    y: list[float]
    within: list[float]


def draw(comparison: Comparison, most: int | None = None) -> dict[str, Figure]:
    """Return all pictures for which there is data, by file name without suffix.

    Args:
        comparison: the results; a sweep also has a picture for each of its settings.
        most: number of configurations of a sweep with curves, best first; None for all.
    """
    if not comparison.runs:
        return {}
    with rc_context(theme.SETTINGS):
        drawn = {f"score-by-{key}": _score_by_setting(comparison, key) for key in comparison.keys}
        if comparison.keys:
            comparison = replace(comparison, configurations=tuple(comparison.shown[:most]))
        looks = looks_of([one.label for one in comparison.configurations])
        drawn |= {name: plot(comparison, looks) for name, plot in _PLOTS.items()}
    return {name: figure for name, figure in drawn.items() if figure is not None}


def score_by_round(comparison: Comparison, looks: Looks) -> Figure | None:
    """Plot the score of the fleet by round."""
    histories = _histories(comparison, lambda point: point.number)
    figure = _plot(comparison, "by round", "round", histories, looks)
    if figure:
        figure.axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def score_by_uplink(comparison: Comparison, looks: Looks) -> Figure | None:
    """Plot the score of the fleet against all bytes sent up; a method that sends no model is a horizontal
    line.
    """
    histories = _histories(comparison, lambda point: point.up)
    for label, found in histories.items():
        if all(_sends_no_model(run) for run in comparison.of(label)):
            histories[label] = History([], found.y, found.within)
    scale = readable.byte_scale(_farthest(histories))
    label = f"sent up by all devices, {readable.byte_unit(scale)}"
    return _plot(comparison, "by bytes sent", label, histories, looks, unit=1000**scale)


def score_by_time(comparison: Comparison, looks: Looks) -> Figure | None:
    """Plot the score of the fleet against simulated time."""
    histories = _histories(comparison, lambda point: point.closed_s)
    unit, sign = readable.clock(_farthest(histories))
    return _plot(comparison, "by time", f"simulated time, {sign}", histories, looks, unit=unit)


def score_by_device(comparison: Comparison, looks: Looks) -> Figure | None:
    """Plot the personal scores of the devices of all seeds, sorted."""
    values = {
        one.label: [value for run in comparison.of(one.label) for value in personal(run.summary).values()]
        for one in comparison.shown
    }
    return devices_plot(comparison.score, values, looks)


_PLOTS: dict[str, Callable[[Comparison, Looks], Figure | None]] = {
    "accuracy-by-round": score_by_round,
    "accuracy-by-uplink": score_by_uplink,
    "accuracy-by-time": score_by_time,
    "accuracy-by-device": score_by_device,
}


def _score_by_setting(comparison: Comparison, key: str) -> Figure | None:
    """Plot one dot for each combination, the mean over seeds, against the value of one setting.

    A line joins the best combination of each value, unless there are many values.
    """
    score, times = comparison.score, unit_of(comparison.score).on_axis
    means: dict[str, list[float]] = {}
    for one in comparison.shown:
        found = comparison.spread(one.label, PERSONAL_MEAN)
        if found:
            means.setdefault(as_text(one.value(key)), []).append(times * found.mean)
    if len(means) < 2:
        return None
    values = sorted(means, key=_order)
    best = [(max if better_by(score) > 0 else min)(means[value]) for value in values]
    figure, axes = blank(titled(score, f"by {readable.clip(key, 30)}"), key, AFTER.for_score(score).axis)
    on_numbers = len(values) > NAMED_VALUES and not any(_order(value)[0] for value in values)
    places = [float(value) for value in values] if on_numbers else range(len(values))
    for place, value in zip(places, values, strict=True):
        axes.plot([place] * len(means[value]), means[value], "o", color=theme.RIVAL, alpha=0.6)
    if not on_numbers:
        axes.plot(places, best, "-o", color=theme.OURS, zorder=3)
        axes.set_xticks(places, [readable.clip(value, 10) for value in values])
    elif 0 < WIDE * places[0] < places[-1]:
        axes.set_xscale("log")
    return figure


def _order(value: str) -> tuple[int, float, str]:
    """Return a sort key: numbers by size, then texts."""
    try:
        return 0, float(value), value
    except ValueError:
        return 1, 0.0, value


def _histories(comparison: Comparison, x: Callable[[Point], float]) -> dict[str, History]:
    times = unit_of(comparison.score).on_axis
    found = {one.label: _mean_history(comparison.of(one.label), x, times) for one in comparison.shown}
    return {label: history for label, history in found.items() if history.y}


def _mean_history(runs: Sequence[FinishedRun], x: Callable[[Point], float], times: float) -> History:
    """Return the mean over runs; a run that ended early keeps its last score."""
    found = History([], [], [])
    histories = [run.history for run in runs if run.history]
    for index in range(max((len(history) for history in histories), default=0)):
        points = [history[min(index, len(history) - 1)] for history in histories]
        score = spread(point.after for point in points)
        if score:
            found.x.append(statistics.fmean(x(point) for point in points))
            found.y.append(times * score.mean)
            found.within.append(times * (score.deviation or 0))
    return found


def _farthest(histories: Mapping[str, History]) -> float:
    return max((one.x[-1] for one in histories.values() if one.x), default=0.0)


def _plot(
    comparison: Comparison,
    title: str,
    x_label: str,
    histories: Mapping[str, History],
    looks: Looks,
    *,
    unit: float = 1,
) -> Figure | None:
    curves = [
        Curve(
            end_label(comparison.score, one.y[-1], label),
            one.y,
            [value / unit for value in one.x],
            band=one.within,
            **looks[label],
        )
        for label, one in histories.items()
    ]
    figure = score_plot(comparison.score, title, x_label, curves)
    if figure:
        _x_scale(figure.axes[0], [one.x for one in histories.values() if one.x], unit)
    return figure


def _x_scale(axes: Axes, x: Sequence[list[float]], unit: float) -> None:
    """Make the axis logarithmic if some curves are many times longer than others.

    On a linear axis, the short curves would be unreadable.
    """
    ends = [values[-1] for values in x if values[-1] > 0]
    starts = [values[0] for values in x if values[0] > 0]
    if not ends or max(ends) < LOG_FROM * min(ends):
        return
    axes.set_xscale("log")
    axes.set_xlim(0.8 * min(starts) / unit, 1.1 * max(ends) / unit)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0) if max(ends) < 2000 * min(starts) else (1.0,)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _sends_no_model(run: FinishedRun) -> bool:
    return (run.summary.bytes.share_up or 0) < SENDS_NO_MODEL
