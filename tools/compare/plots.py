"""A comparison's plots: accuracy by round, by bytes and by time; before and after training; by device."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from fleetune.coordinator.metrics import readable
from fleetune.coordinator.metrics.metric import titled, unit_of
from fleetune.coordinator.metrics.personal_scores import LOCAL, personal
from fleetune.coordinator.metrics.registry import AFTER, AFTER_MEAN, BEFORE_MEAN
from fleetune.coordinator.reports.pictures.theme import Theme, blank, label_ends
from fleetune.protocols.tasks.scores import Score
from fleetune.tools.compare.comparison import Comparison, spread
from fleetune.tools.compare.played import Played, Point, Side

FEDAVG = "fedavg"
SENDS_NO_MODEL = 0.01  # of whole models' bytes
LOG_FROM = 12  # times as far
ROW_IN = 0.36
NAME_LETTERS = 22
FEW = 5  # contenders whose bands may be seen at once


@dataclass(frozen=True)
class Look:
    """How a contender is drawn, in every plot alike."""

    colour: str
    dashes: tuple[int, tuple[int, ...]] | str


@dataclass(frozen=True)
class Curve:
    """Accuracy over the course of a contender's runs, round by round, mean over seeds.

    Attributes:
        x: where a round is drawn; a mean over seeds, too.
        y, within: the score (a share in percent), and its standard deviation, 0 with one seed.
    """

    x: list[float]
    y: list[float]
    within: list[float]


def draw(comparison: Comparison, theme: Theme) -> dict[str, Figure]:
    """The plots that there is data for, by file name without suffix."""
    if not comparison.runs:
        return {}
    looks = _looks([contender.label for contender in comparison.contenders], theme)
    with rc_context(theme.settings):
        drawn = {name: plot(comparison, looks, theme) for name, plot in _PLOTS.items()}
    return {name: figure for name, figure in drawn.items() if figure is not None}


Looks = Mapping[str, Look]


def accuracy_by_round(comparison: Comparison, looks: Looks, _: Theme, side: Side = "after") -> Figure | None:
    """The fleet's accuracy by round."""
    curves = _curves(comparison, side, lambda point: point.number)
    which = "after" if side == "after" else "before"
    figure = _lines(comparison.score, f"{which} local training, by round", "round", curves, looks)
    if figure:
        figure.axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def accuracy_before_by_round(comparison: Comparison, looks: Looks, theme: Theme) -> Figure | None:
    """The same of the models that local training started from."""
    return accuracy_by_round(comparison, looks, theme, "before")


def accuracy_by_uplink(comparison: Comparison, looks: Looks, _: Theme) -> Figure | None:
    """The fleet's accuracy against all bytes sent up so far; who sends no model is a level."""
    curves = _curves(comparison, "after", lambda point: point.up)
    silent = {
        label for label in curves if all(_sends_no_model(run) for run in comparison.of(label))
    }  # local-only: a line at the left edge would say less
    farthest = max((curve.x[-1] for label, curve in curves.items() if label not in silent), default=0)
    scale = readable.byte_scale(farthest)
    label = f"sent up by all devices, {readable.byte_unit(scale)}"
    return _lines(comparison.score, "by bytes sent", label, curves, looks, unit=1000**scale, levels=silent)


def accuracy_by_time(comparison: Comparison, looks: Looks, _: Theme) -> Figure | None:
    """The fleet's accuracy against simulated time."""
    curves = _curves(comparison, "after", lambda point: point.closed_s)
    farthest = max((curve.x[-1] for curve in curves.values()), default=0)
    unit, sign = readable.clock(farthest)
    return _lines(comparison.score, "by time", f"simulated time, {sign}", curves, looks, unit=unit)


def before_and_after(comparison: Comparison, looks: Looks, theme: Theme) -> Figure | None:
    """One more round after the last: before (hollow) and after (filled) local training, and deviations."""
    labels = [contender.label for contender in comparison.shown]
    title = "One more round: before ○ and after ● local training"
    figure, axes = _rows(comparison.score, title, labels, looks)
    ends, times = [], unit_of(comparison.score).on_axis
    for height, label in enumerate(labels):
        before, after = (comparison.spread(label, metric) for metric in (BEFORE_MEAN, AFTER_MEAN))
        colour = looks[label].colour
        if before and after:
            span = [times * before.mean, times * after.mean]
            axes.plot(span, [height - 0.11, height + 0.11], color=theme.grid)
        for found, fill, aside in (before, theme.ground, -0.11), (after, colour, 0.11):
            if found:
                within = times * (found.deviation or 0)
                axes.errorbar(
                    times * found.mean,
                    height + aside,
                    xerr=within or None,
                    fmt="o",
                    color=colour,
                    markerfacecolor=fill,
                    markersize=8,
                    elinewidth=1.2,
                    zorder=3,
                )
                ends.append(times * found.mean)
    if not ends:
        return None
    axes.margins(x=0.08)
    return figure


def spread_over_devices(comparison: Comparison, looks: Looks, theme: Theme) -> Figure | None:
    """Each device of each seed as a dot; median, and the middle half as a bar."""
    labels = [contender.label for contender in comparison.shown]
    times = unit_of(comparison.score).on_axis
    values = {
        label: sorted(
            times * value for run in comparison.of(label) for value in personal(run.summary).values()
        )
        for label in labels
    }
    if not any(values.values()):
        return None
    figure, axes = _rows(
        comparison.score, titled(comparison.score, "of each device's personal model"), labels, looks
    )
    for height, label in enumerate(labels):
        own, colour = values[label], looks[label].colour
        if not own:
            continue
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
    "accuracy-by-round": accuracy_by_round,
    "accuracy-before-by-round": accuracy_before_by_round,
    "accuracy-by-uplink": accuracy_by_uplink,
    "accuracy-by-time": accuracy_by_time,
    "before-and-after": before_and_after,
    "spread-over-devices": spread_over_devices,
}


def _looks(labels: Sequence[str], theme: Theme) -> dict[str, Look]:
    """The yardsticks in grey and ink, the others in the palette's colours, then again with dashes."""
    looks = {LOCAL: Look(theme.rival, "-"), FEDAVG: Look(theme.ink, "-")}
    others = [label for label in labels if label not in looks]
    for index, label in enumerate(others):
        again, place = divmod(index, len(theme.contenders))
        looks[label] = Look(theme.contenders[place], (0, (5, 1 + again)) if again else "-")
    return looks


def _curves(comparison: Comparison, side: Side, x: Callable[[Point], float]) -> dict[str, Curve]:
    times = unit_of(comparison.score).on_axis
    found = {
        contender.label: _mean_curve(comparison.of(contender.label), side, x, times)
        for contender in comparison.shown
    }
    return {label: curve for label, curve in found.items() if curve.y}


def _mean_curve(runs: Sequence[Played], side: Side, x: Callable[[Point], float], times: float) -> Curve:
    """Mean over runs; one that ended early stays where it ended."""
    curve = Curve([], [], [])
    there = [run.points for run in runs if run.points]
    for index in range(max((len(points) for points in there), default=0)):
        stand = [points[min(index, len(points) - 1)] for points in there]
        score = spread(getattr(point, side) for point in stand)
        if score:
            curve.x.append(statistics.fmean(x(point) for point in stand))
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
    levels: frozenset[str] | set[str] = frozenset(),
) -> Figure | None:
    """A curve each with its band and its end labelled; `levels` are drawn as levels where they end."""
    if not curves:
        return None
    figure, axes = blank(
        titled(score, title),
        x_label,
        AFTER.for_score(score).axis,
        height_in=max(3.6, 1.2 + 0.24 * len(curves)),
    )
    for label, curve in curves.items():
        look, x = looks[label], [value / unit for value in curve.x]
        if label in levels:
            axes.axhline(curve.y[-1], color=look.colour, linestyle=(0, (1, 2)), linewidth=1.4)
            continue
        axes.plot(x, curve.y, color=look.colour, linestyle=look.dashes, linewidth=1.8, zorder=3)
        axes.plot(x[-1], curve.y[-1], "o", color=look.colour, zorder=4, clip_on=False)
        low = [y - within for y, within in zip(curve.y, curve.within, strict=True)]
        high = [y + within for y, within in zip(curve.y, curve.within, strict=True)]
        axes.fill_between(
            x, low, high, color=look.colour, alpha=0.14 if len(curves) <= FEW else 0.06, linewidth=0
        )
    _x_scale(axes, [curve.x for label, curve in curves.items() if label not in levels], unit)
    if score.share:
        low_y, high_y = axes.get_ylim()
        axes.set_ylim(max(low_y, -1.0), min(high_y, 101.0))
    ends = [
        (
            curve.y[-1],
            f"{curve.y[-1]:{'.1f' if score.share else '.3g'}}  {readable.clip(label, NAME_LETTERS)}",
            looks[label].colour,
        )
        for label, curve in curves.items()
    ]
    label_ends(axes, ends)
    return figure


def _x_scale(axes: Axes, x: Sequence[list[float]], unit: float) -> None:
    """Logarithmic where some go many times as far as others, who would be a smear at the left."""
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
    """A row each, the first on top."""
    figure, axes = blank(title, AFTER.for_score(score).axis, "", height_in=1.3 + ROW_IN * len(labels))
    axes.set_yticks(range(len(labels)), [readable.clip(label, NAME_LETTERS) for label in labels])
    for tick, label in zip(axes.get_yticklabels(), labels, strict=True):
        tick.set_color(looks[label].colour)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    return figure, axes


def _sends_no_model(run: Played) -> bool:
    return (run.summary.bytes.share_up or 0) < SENDS_NO_MODEL
