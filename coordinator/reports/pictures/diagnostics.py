"""Pictures of a method's inner workings: a line over rounds, or a heat map of rounds and parts."""

from math import nan

from matplotlib import rc_context
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fleetune.coordinator.metrics import readable
from fleetune.coordinator.metrics.summary import DiagnosticHistory, Summary
from fleetune.coordinator.reports.diagnostics.entries import PICTURE, unit_of
from fleetune.coordinator.reports.pictures.theme import Theme, blank, label_ends

_MOST_NAMED = 24  # parts; of more, as many as fit are named
_MOST_COLUMNS = 12  # rounds that are named
_FEW = 15  # points that are marked


def diagnostic_pictures(summary: Summary, theme: Theme) -> dict[str, Figure]:
    """One of each figure that the method tells, by file name without suffix."""
    told = [number for course in summary.diagnostics_by_name.values() for number in course.rounds]
    with rc_context(theme.settings):
        return {
            f"{PICTURE}{name}": _heat_map(course, theme)
            if course.parts
            else _line(course, (min(told), max(told)), theme)
            for name, course in summary.diagnostics_by_name.items()
        }


def _line(course: DiagnosticHistory, rounds: tuple[int, int], theme: Theme) -> Figure:
    """The mean, with a band from the least device to the greatest.

    `rounds` are the first and the last of the run: what is not told in all of them ends early.
    """
    scale, sign = _scale(course)
    figure, axes = blank(_title(course.title), "round", sign or course.title)
    mean, low, high = ([scale * one for one in row] for row in (course.mean, course.least, course.greatest))
    if low != high:
        axes.fill_between(course.rounds, low, high, color=theme.ours, alpha=0.2, linewidth=0)
    axes.plot(course.rounds, mean, color=theme.ours, marker="o" if len(mean) <= _FEW else "", zorder=3)
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
    label_ends(axes, [(mean[-1], unit_of(course.unit).text(course.mean[-1]), theme.ours)])
    return figure


def _heat_map(course: DiagnosticHistory, theme: Theme) -> Figure:
    """A row a part, a column a round; what was not told is grey. The last values stand at the right."""
    names, text = list(course.parts), unit_of(course.unit).text
    known = [one for row in course.parts.values() for one in row if one is not None]
    low, high = min(0.0, *known), max(known)
    figure, axes = blank(
        _title(f"{course.title} by {course.by}"),
        f"round; colours from {text(low)} to {text(high)}",
        "",
        height_in=1.35 + 0.27 * min(max(len(names), 3), _MOST_NAMED),
    )
    colours = LinearSegmentedColormap.from_list("inside", [theme.ground, theme.ours])
    axes.set_facecolor(theme.grid)  # seen where nothing was told
    rows = [[nan if one is None else one for one in row] for row in course.parts.values()]
    top = high if high > low else low + 1
    axes.imshow(rows, cmap=colours, vmin=low, vmax=top, aspect="auto", interpolation="nearest")
    axes.grid(visible=False)
    step = -(-len(names) // _MOST_NAMED)
    places = range(0, len(names), step)
    axes.set_yticks(places, [readable.clip(readable.printable(names[place])) for place in places])
    columns = _columns(len(course.rounds))
    axes.set_xticks(columns, [str(course.rounds[column]) for column in columns])
    last = course.last_parts
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
    """Of so many columns those that are named, the last among them."""
    step = -(-count // _MOST_COLUMNS)
    return list(range((count - 1) % step, count, step))


def _scale(course: DiagnosticHistory) -> tuple[float, str]:
    sign = unit_of(course.unit).sign
    return (100.0, sign) if sign == "%" else (1.0, sign)


def _title(words: str) -> str:
    return readable.printable(words[:1].upper() + words[1:])
