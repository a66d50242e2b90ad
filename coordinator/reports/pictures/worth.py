"""The picture of what ratios were worth, in runs whose coordinator proposes them."""

from math import sqrt

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from msgspec import UNSET

from fleetune.coordinator.metrics.metric import unit_of
from fleetune.coordinator.metrics.summary import RatioSummary, Summary
from fleetune.coordinator.reports.pictures.theme import Theme, blank

_LARGEST = 18.0  # a dot's diameter in points, where all replies were made at one ratio
_SMALLEST = 3.0


def worth_by_ratio(summary: Summary, theme: Theme) -> Figure | None:
    """A dot a ratio, the larger the more replies were made at it; bars of one standard deviation.

    None: the run proposes no ratios, or nothing was compared yet.
    """
    known = [] if summary.by_ratio is UNSET else [row for row in summary.by_ratio if row.worth is not None]
    if len(known) < 2:
        return None
    score = summary.judged_by
    axis = "points" if score.share else score.title
    figure, axes = blank("What it is worth to work at a ratio", "ratio", axis)
    axes.axhline(0.0, color=theme.faint, linewidth=1)
    all_replies = sum(row.replies for row in known)
    for row in known:
        _dot(axes, row, unit_of(score).on_axis, sqrt(row.replies / all_replies), theme)
    axes.set_xticks([row.ratio for row in known], [f"{row.ratio:g}" for row in known])
    return figure


def _dot(axes: Axes, row: RatioSummary, scale: float, size: float, theme: Theme) -> None:
    place, spread = scale * (row.worth or 0.0), scale * (row.deviation or 0.0)
    axes.errorbar(row.ratio, place, spread, color=theme.ours, linewidth=1.4, capsize=3, zorder=3)
    axes.plot(row.ratio, place, "o", color=theme.ours, markersize=max(_SMALLEST, _LARGEST * size), zorder=4)
