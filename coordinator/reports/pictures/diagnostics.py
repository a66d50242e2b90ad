"""Pictures of a method's diagnostics: a line over rounds, or a heat map of rounds and parts."""

from math import nan

from matplotlib import rc_context
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fleetune.coordinator.metrics import readable
from fleetune.coordinator.metrics.diagnostics import PICTURE, unit_of_diagnostic
from fleetune.coordinator.metrics.summary import DiagnosticHistory, Summary
from fleetune.coordinator.reports.pictures.theme import Theme, blank, label_ends

_MOST_NAMED = 24  # largest number of parts with a label; of more parts, only some are labelled
_MOST_COLUMNS = 12  # largest number of labelled rounds
_FEW = 15  # largest number of points for which markers are drawn


def diagnostic_pictures(summary: Summary, theme: Theme) -> dict[str, Figure]:
    """One picture for each diagnostic that the method reports, by file name without suffix."""
    round_numbers = [number for history in summary.diagnostics_by_name.values() for number in history.rounds]
    with rc_context(theme.settings):
        return {
            f"{PICTURE}{name}": _heat_map(history, theme)
            if history.parts
            else _line(history, (min(round_numbers), max(round_numbers)), theme)
            for name, history in summary.diagnostics_by_name.items()
        }


def _line(history: DiagnosticHistory, rounds: tuple[int, int], theme: Theme) -> Figure:
    """A line of the mean over rounds, with a band from the lowest device to the highest.

    `rounds` are the first and last round of the run. The line ends early if later rounds do not report the
    diagnostic.
    """
    scale, sign = _scale(history)
    figure, axes = blank(_title(history.title), "round", sign or history.title)
    mean, low, high = (
        [scale * one for one in row] for row in (history.mean, history.least, history.greatest)
    )
    if low != high:
        axes.fill_between(history.rounds, low, high, color=theme.ours, alpha=0.2, linewidth=0)
    axes.plot(history.rounds, mean, color=theme.ours, marker="o" if len(mean) <= _FEW else "", zorder=3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if not sign and all(one.is_integer() for one in mean):
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    room = 0.04 * max(1, rounds[1] - rounds[0])
    axes.set_xlim(rounds[0] - room, rounds[1] + room)
    bottom, top = axes.get_ylim()
    if min(low) >= 0:
        highest = max(high) or 1.0
        bottom, top = -0.02 * highest, 1.06 * highest
    axes.set_ylim(bottom, min(top, 102.0) if sign and max(high) <= 100 else top)
    label_ends(axes, [(mean[-1], unit_of_diagnostic(history.unit).text(history.mean[-1]), theme.ours)])
    return figure


def _heat_map(history: DiagnosticHistory, theme: Theme) -> Figure:
    """A heat map with a row for each part and a column for each round. Missing values are grey; the last
    values are written at the right.
    """
    names, text = list(history.parts), unit_of_diagnostic(history.unit).text
    known = [one for row in history.parts.values() for one in row if one is not None]
    low, high = min(0.0, *known), max(known)
    figure, axes = blank(
        _title(f"{history.title} by {history.by}"),
        f"round; colours from {text(low)} to {text(high)}",
        "",
        height_in=1.35 + 0.27 * min(max(len(names), 3), _MOST_NAMED),
    )
    colours = LinearSegmentedColormap.from_list("diagnostics", [theme.ground, theme.ours])
    axes.set_facecolor(theme.grid)  # colour of missing values
    rows = [[nan if one is None else one for one in row] for row in history.parts.values()]
    top = high if high > low else low + 1
    axes.imshow(rows, cmap=colours, vmin=low, vmax=top, aspect="auto", interpolation="nearest")
    axes.grid(visible=False)
    step = -(-len(names) // _MOST_NAMED)
    places = range(0, len(names), step)
    axes.set_yticks(places, [readable.clip(readable.printable(names[place])) for place in places])
    columns = _columns(len(history.rounds))
    axes.set_xticks(columns, [str(history.rounds[column]) for column in columns])
    last = history.last_parts
    for place in places:
        if names[place] in last:
            axes.annotate(
                text(last[names[place]]),
                (1, place),
                xycoords=("axes fraction", "data"),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                color=theme.faint,
                annotation_clip=False,
            )
    return figure


def _columns(count: int) -> list[int]:
    """Indices of the columns that are labelled, including the last."""
    step = -(-count // _MOST_COLUMNS)
    return list(range((count - 1) % step, count, step))


def _scale(history: DiagnosticHistory) -> tuple[float, str]:
    sign = unit_of_diagnostic(history.unit).sign
    return (100.0, sign) if sign == "%" else (1.0, sign)


def _title(words: str) -> str:
    return readable.printable(words[:1].upper() + words[1:])
