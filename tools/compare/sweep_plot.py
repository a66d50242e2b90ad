"""What each setting of a sweep makes of the score, whatever the others are."""

from collections.abc import Sequence

from matplotlib import rc_context
from matplotlib.figure import Figure

from fleetune.coordinator.metrics import readable
from fleetune.coordinator.metrics.metric import titled, unit_of
from fleetune.coordinator.metrics.personal_scores import better_by
from fleetune.coordinator.metrics.registry import AFTER, PERSONAL_MEAN
from fleetune.coordinator.reports.pictures.theme import Theme, blank
from fleetune.tools.compare.comparison import Comparison
from fleetune.tools.compare.sweep_tables import in_words, value_of

PANEL_IN = 3.6
LETTERS = 10
NAMED = 12  # values; more stand on an axis of numbers, without a line: most have one dot
WIDE = 20  # times the least: then the axis is logarithmic


def score_by_setting(comparison: Comparison, keys: Sequence[str], theme: Theme) -> dict[str, Figure]:
    """By setting, one picture each: a dot a combination, its mean over seeds, and a line along the best of
    each value; of the many values of a search dots alone.
    """
    drawn = {}
    with rc_context(theme.settings):
        for key in keys:
            figure = _of_setting(comparison, key, theme)
            if figure is not None:
                drawn[f"score-by-{key}"] = figure
    return drawn


def _of_setting(comparison: Comparison, key: str, theme: Theme) -> Figure | None:
    score, times = comparison.score, unit_of(comparison.score).on_axis
    means: dict[str, list[float]] = {}
    for one in comparison.shown:
        found = comparison.spread(one.label, PERSONAL_MEAN)
        if found:
            means.setdefault(in_words(value_of(one, key)), []).append(times * found.mean)
    if len(means) < 2:
        return None
    values = sorted(means, key=_place)
    best = [(max if better_by(score) > 0 else min)(means[value]) for value in values]
    title = titled(score, f"of personal models, by {readable.clip(key, 30)}")
    figure, axes = blank(title, key, AFTER.for_score(score).axis, height_in=PANEL_IN)
    numbers = _numbers(values)
    places = numbers or range(len(values))
    for place, value in zip(places, values, strict=True):
        own = means[value]
        axes.plot([place] * len(own), own, "o", color=theme.rival, alpha=0.6, markersize=5)
    if numbers is None:
        axes.plot(places, best, "-o", color=theme.ours, linewidth=1.8, zorder=3)
        axes.set_xticks(places, [readable.clip(value, LETTERS) for value in values])
    elif numbers[0] > 0 and numbers[-1] > WIDE * numbers[0]:
        axes.set_xscale("log")
    axes.margins(x=0.08, y=0.12)
    return figure


def _numbers(values: Sequence[str]) -> list[float] | None:
    """Ascending values as numbers, where a search tried more than could be named one by one."""
    if len(values) <= NAMED or any(_place(value)[0] for value in values):
        return None
    return [float(value) for value in values]


def _place(value: str) -> tuple[int, float, str]:
    """Numbers by size, and before words."""
    try:
        return 0, float(value), value
    except ValueError:
        return 1, 0.0, value
