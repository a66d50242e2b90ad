"""Picture of predicted cost: predicted against actual seconds, one dot for each reply."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from fleetune.coordinator.metrics import readable
from fleetune.coordinator.metrics.predicted_cost import LEARNING_ROUNDS, Pair, errors_of
from fleetune.coordinator.reports.pictures.theme import Theme, blank, name_above
from fleetune.protocols.randomness import Key

MOST_DOTS = 1000  # dots of each kind, limited because an SVG contains every dot
_SHORTEST_S, _LONGEST_S = 1e-6, 1e9  # what devices claim beyond these would leave no room for the rest
_NARROWEST = 6.0  # times the shortest that an axis goes up to


def seconds_scatter(pairs: Sequence[Pair], theme: Theme) -> Figure | None:
    """Predicted and actual seconds on logarithmic axes, with a band for predictions within a quarter of the
    actual time.

    Of more than `MOST_DOTS` replies, a random sample is drawn. None if there is nothing to draw.
    """
    drawable = [
        pair
        for pair in pairs
        if min(pair.predicted, pair.actual) >= _SHORTEST_S and max(pair.predicted, pair.actual) <= _LONGEST_S
    ]
    if not drawable:
        return None
    figure, axes = blank("", "predicted", "took", height_in=4.4)
    low, high = _limits(drawable)
    axes.plot([low, high], [low, high], color=theme.faint, linewidth=1)
    axes.fill_between([low, high], [low / 1.25, high / 1.25], [low / 0.75, high / 0.75], color=theme.grid)
    early = _downsampled([pair for pair in drawable if not pair.learned])
    later = _downsampled([pair for pair in drawable if pair.learned])
    for dots, colour, label in (
        (early, theme.start, f"first {LEARNING_ROUNDS} rounds of a device"),
        (later, theme.ours, "later rounds"),
    ):
        if dots:
            places = [pair.predicted for pair in dots], [pair.actual for pair in dots]
            faint = 0.8 if len(dots) < 200 else 0.35
            axes.plot(*places, "o", color=colour, label=label, markersize=4.5, alpha=faint, zorder=3)
    _log_axes(axes, low, high)
    legend = name_above(axes, _title(pairs))
    for handle in legend.legend_handles:
        if handle is not None:
            handle.set_alpha(1)
    return figure


def _title(pairs: Sequence[Pair]) -> str:
    found = errors_of(pair for pair in pairs if pair.learned) or errors_of(pairs)
    assert found is not None, "there are pairs"
    half, most = (readable.error(found.median), readable.error(found.worst_decile))
    return f"Half predicted within {half}, nine in ten within {most}"


def _limits(pairs: Sequence[Pair]) -> tuple[float, float]:
    values = [value for pair in pairs for value in (pair.predicted, pair.actual)]
    low, high = min(values) / 1.2, max(values) * 1.2
    wider = max(1.0, _NARROWEST * low / high) ** 0.5
    return low / wider, high * wider


def _downsampled(pairs: Sequence[Pair]) -> Sequence[Pair]:
    """A random sample. Every n-th pair would select the same devices in each round."""
    if len(pairs) <= MOST_DOTS:
        return pairs
    return [pairs[index] for index in Key.of("scatter").sample(MOST_DOTS, len(pairs))]


def _log_axes(axes: Axes, low: float, high: float) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    for axis in axes.xaxis, axes.yaxis:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 300 else (1,), numticks=12))
        axis.set_major_formatter(FuncFormatter(lambda value, _: readable.duration(value)))
        axis.set_minor_formatter(NullFormatter())
        axis.minorticks_off()
