"""The pictures of a comparison: scores by round, bytes, time and setting, around local training, and by
device.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from fleetune.coordinator.metrics import readable
from fleetune.coordinator.metrics.metric import titled, unit_of
from fleetune.coordinator.metrics.personal_scores import LOCAL, better_by, personal
from fleetune.coordinator.metrics.registry import AFTER, AFTER_MEAN, BEFORE_MEAN, PERSONAL_MEAN
from fleetune.coordinator.reports.pictures.theme import Theme, blank, label_ends
from fleetune.protocols.tasks.scores import Score
from fleetune.tools.compare.comparison import Comparison, as_text, spread
from fleetune.tools.compare.finished_run import FinishedRun, Point, Side

FEDAVG = "fedavg"
SENDS_NO_MODEL = 0.01  # a method below this share of a whole model's bytes sends no model
LOG_FROM = 12  # ratio of the longest to the shortest curve from which the axis is logarithmic
ROW_IN, PANEL_IN = 0.36, 3.6
NAME_LETTERS, VALUE_LETTERS = 22, 10
FEW = 5  # maximum number of configurations with distinguishable bands
NAMED_VALUES = 12  # with more values than these, a setting has a numeric axis without a line
WIDE = 20  # ratio of the largest to the smallest value from which the axis is logarithmic


@dataclass(frozen=True)
class Look:
    """Colour and dashes of a configuration, the same in every picture."""

    colour: str
    dashes: tuple[int, tuple[int, ...]] | str


@dataclass(frozen=True)
class Curve:
    """The score of a configuration by round, mean over seeds.

    Attributes:
        x: horizontal position of each round, mean over seeds.
        y: the score (a share in percent).
        within: standard deviation of the score; 0 with one seed.
    """

    x: list[float]
    y: list[float]
    within: list[float]


Looks = Mapping[str, Look]


def draw(comparison: Comparison, theme: Theme, most: int | None = None) -> dict[str, Figure]:
    """All pictures for which there is data, by file name without suffix.

    Args:
        comparison: the results; a sweep also has a picture for each of its settings.
        theme: theme of the pictures.
        most: maximum number of configurations of a sweep with curves, the first ones; None: all.
    """
    if not comparison.runs:
        return {}
    by_setting = {f"score-by-{key}": _score_by_setting(comparison, key, theme) for key in comparison.keys}
    if comparison.keys:
        comparison = replace(comparison, configurations=tuple(comparison.shown[:most]))
    looks = _looks([one.label for one in comparison.configurations], theme)
    with rc_context(theme.settings):
        drawn = {name: plot(comparison, looks, theme) for name, plot in _PLOTS.items()}
    return {name: figure for name, figure in {**by_setting, **drawn}.items() if figure is not None}


def score_by_round(comparison: Comparison, looks: Looks, _: Theme, side: Side = "after") -> Figure | None:
    """The score of the fleet by round."""
    curves = _curves(comparison, side, lambda point: point.number)
    figure = _lines(comparison.score, f"{side} local training, by round", "round", curves, looks)
    if figure:
        figure.axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def score_before_by_round(comparison: Comparison, looks: Looks, theme: Theme) -> Figure | None:
    """The score of the models that local training starts from, by round."""
    return score_by_round(comparison, looks, theme, "before")


def score_by_uplink(comparison: Comparison, looks: Looks, _: Theme) -> Figure | None:
    """The score of the fleet against all bytes sent up; a method that sends no model is a horizontal line."""
    curves = _curves(comparison, "after", lambda point: point.up)
    silent = {label for label in curves if all(_sends_no_model(run) for run in comparison.of(label))}
    farthest = max((curve.x[-1] for label, curve in curves.items() if label not in silent), default=0)
    scale = readable.byte_scale(farthest)
    label = f"sent up by all devices, {readable.byte_unit(scale)}"
    return _lines(comparison.score, "by bytes sent", label, curves, looks, unit=1000**scale, levels=silent)


def score_by_time(comparison: Comparison, looks: Looks, _: Theme) -> Figure | None:
    """The score of the fleet against simulated time."""
    curves = _curves(comparison, "after", lambda point: point.closed_s)
    farthest = max((curve.x[-1] for curve in curves.values()), default=0)
    unit, sign = readable.clock(farthest)
    return _lines(comparison.score, "by time", f"simulated time, {sign}", curves, looks, unit=unit)


def before_and_after(comparison: Comparison, looks: Looks, theme: Theme) -> Figure | None:
    """The score before (hollow) and after (filled) one more round of local training, with deviations."""
    labels = [one.label for one in comparison.shown]
    title = "One more round: before ○ and after ● local training"
    figure, axes = _rows(comparison.score, title, labels, looks)
    drawn, times = False, unit_of(comparison.score).on_axis
    for height, label in enumerate(labels):
        before, after = (comparison.spread(label, metric) for metric in (BEFORE_MEAN, AFTER_MEAN))
        colour = looks[label].colour
        if before and after:
            span = [times * before.mean, times * after.mean]
            axes.plot(span, [height - 0.11, height + 0.11], color=theme.grid)
        for found, fill, aside in (before, theme.ground, -0.11), (after, colour, 0.11):
            if found:
                drawn = True
                axes.errorbar(
                    times * found.mean,
                    height + aside,
                    xerr=times * (found.deviation or 0) or None,
                    fmt="o",
                    color=colour,
                    markerfacecolor=fill,
                    markersize=8,
                    elinewidth=1.2,
                    zorder=3,
                )
    axes.margins(x=0.08)
    return figure if drawn else None


def spread_over_devices(comparison: Comparison, looks: Looks, theme: Theme) -> Figure | None:
    """The score of each device of each seed as a dot, with the median, and the middle half as a bar."""
    times = unit_of(comparison.score).on_axis
    values = {
        one.label: sorted(
            times * value for run in comparison.of(one.label) for value in personal(run.summary).values()
        )
        for one in comparison.shown
    }
    if not any(values.values()):
        return None
    title = titled(comparison.score, "of each device's personal model")
    figure, axes = _rows(comparison.score, title, list(values), looks)
    for height, (label, own) in enumerate(values.items()):
        colour = looks[label].colour
        places = [height + 0.5 * (index * 0.618 % 1 - 0.5) for index in range(len(own))]
        axes.scatter(own, places, s=9, color=colour, alpha=0.35, linewidths=0, rasterized=len(own) > 400)
        if len(own) > 1:
            low, middle, high = statistics.quantiles(own, n=4, method="inclusive")
            axes.plot(
                [low, high], [height, height], color=colour, linewidth=5, alpha=0.75, solid_capstyle="butt"
            )
            axes.plot(middle, height, "o", color=theme.ground, markeredgecolor=colour, markersize=8, zorder=4)
    return figure


_PLOTS: dict[str, Callable[[Comparison, Looks, Theme], Figure | None]] = {
    "accuracy-by-round": score_by_round,
    "accuracy-before-by-round": score_before_by_round,
    "accuracy-by-uplink": score_by_uplink,
    "accuracy-by-time": score_by_time,
    "before-and-after": before_and_after,
    "spread-over-devices": spread_over_devices,
}


def _score_by_setting(comparison: Comparison, key: str, theme: Theme) -> Figure | None:
    """One dot for each combination, mean over seeds; a line joins the best of each value unless values are
    many.
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
    title = titled(score, f"of personal models, by {readable.clip(key, 30)}")
    with rc_context(theme.settings):
        figure, axes = blank(title, key, AFTER.for_score(score).axis, height_in=PANEL_IN)
        on_numbers = len(values) > NAMED_VALUES and not any(_order(value)[0] for value in values)
        places = [float(value) for value in values] if on_numbers else range(len(values))
        for place, value in zip(places, values, strict=True):
            axes.plot(
                [place] * len(means[value]), means[value], "o", color=theme.rival, alpha=0.6, markersize=5
            )
        if not on_numbers:
            axes.plot(places, best, "-o", color=theme.ours, linewidth=1.8, zorder=3)
            axes.set_xticks(places, [readable.clip(value, VALUE_LETTERS) for value in values])
        elif 0 < WIDE * places[0] < places[-1]:
            axes.set_xscale("log")
        axes.margins(x=0.08, y=0.12)
    return figure


def _order(value: str) -> tuple[int, float, str]:
    """A sort key: numbers by size, then texts."""
    try:
        return 0, float(value), value
    except ValueError:
        return 1, 0.0, value


def _looks(labels: Sequence[str], theme: Theme) -> dict[str, Look]:
    """Looks of the configurations: baselines in grey and black, the others in the palette's colours, then
    dashed.
    """
    looks = {LOCAL: Look(theme.rival, "-"), FEDAVG: Look(theme.ink, "-")}
    others = [label for label in labels if label not in looks]
    for index, label in enumerate(others):
        again, place = divmod(index, len(theme.contenders))
        looks[label] = Look(theme.contenders[place], (0, (5, 1 + again)) if again else "-")
    return looks


def _curves(comparison: Comparison, side: Side, x: Callable[[Point], float]) -> dict[str, Curve]:
    times = unit_of(comparison.score).on_axis
    curves = {one.label: _mean_curve(comparison.of(one.label), side, x, times) for one in comparison.shown}
    return {label: curve for label, curve in curves.items() if curve.y}


def _mean_curve(runs: Sequence[FinishedRun], side: Side, x: Callable[[Point], float], times: float) -> Curve:
    """Mean over runs; a run that ended early keeps its last score."""
    curve = Curve([], [], [])
    histories = [run.history for run in runs if run.history]
    for index in range(max((len(history) for history in histories), default=0)):
        points = [history[min(index, len(history) - 1)] for history in histories]
        score = spread(getattr(point, side) for point in points)
        if score:
            curve.x.append(statistics.fmean(x(point) for point in points))
            curve.y.append(times * score.mean)
            curve.within.append(times * (score.deviation or 0))
    return curve


def _lines(
    score: Score,
    title: str,
    x_label: str,
    curves: Mapping[str, Curve],
    looks: Looks,
    *,
    unit: float = 1,
    levels: Iterable[str] = (),
) -> Figure | None:
    """Each curve with its band and a label at its end; `levels` are drawn as horizontal lines."""
    if not curves:
        return None
    height_in = max(3.6, 1.2 + 0.24 * len(curves))
    figure, axes = blank(titled(score, title), x_label, AFTER.for_score(score).axis, height_in=height_in)
    ends, sloping = [], [curve.x for label, curve in curves.items() if label not in levels]
    for label, curve in curves.items():
        look, x, end = looks[label], [value / unit for value in curve.x], curve.y[-1]
        text = f"{end:{'.1f' if score.share else '.3g'}}  {readable.clip(label, NAME_LETTERS)}"
        ends.append((end, text, look.colour))
        if label in levels:
            axes.axhline(end, color=look.colour, linestyle=(0, (1, 2)), linewidth=1.4)
            continue
        axes.plot(x, curve.y, color=look.colour, linestyle=look.dashes, linewidth=1.8, zorder=3)
        axes.plot(x[-1], end, "o", color=look.colour, zorder=4, clip_on=False)
        low = [y - within for y, within in zip(curve.y, curve.within, strict=True)]
        high = [y + within for y, within in zip(curve.y, curve.within, strict=True)]
        alpha = 0.14 if len(curves) <= FEW else 0.06
        axes.fill_between(x, low, high, color=look.colour, alpha=alpha, linewidth=0)
    _x_scale(axes, sloping, unit)
    if score.share:
        low_y, high_y = axes.get_ylim()
        axes.set_ylim(max(low_y, -1.0), min(high_y, 101.0))
    label_ends(axes, ends)
    return figure


def _x_scale(axes: Axes, x: Sequence[list[float]], unit: float) -> None:
    """Make the axis logarithmic if some curves are many times longer than others, which would be
    unreadable.
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


def _rows(score: Score, title: str, labels: Sequence[str], looks: Looks) -> tuple[Figure, Axes]:
    """Axes with a row for each label, the first on top."""
    figure, axes = blank(title, AFTER.for_score(score).axis, "", height_in=1.3 + ROW_IN * len(labels))
    axes.set_yticks(range(len(labels)), [readable.clip(label, NAME_LETTERS) for label in labels])
    for tick, label in zip(axes.get_yticklabels(), labels, strict=True):
        tick.set_color(looks[label].colour)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    return figure, axes


def _sends_no_model(run: FinishedRun) -> bool:
    return (run.summary.bytes.share_up or 0) < SENDS_NO_MODEL
