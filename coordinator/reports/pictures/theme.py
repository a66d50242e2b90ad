"""The look of the plots: colours for colour-blind readers, curves, and labels at the curves' ends."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Colours after Okabe and Ito, by what they stand for.
GROUND, INK, FAINT, GRID = "#ffffff", "#1b1f24", "#57606a", "#e3e6ea"  # background, text, axes, grid lines
OURS = "#0072b2"  # the run itself: after local training
START = "#d55e00"  # before local training; also a loss
UP, DOWN = "#00845e", "#aa4499"  # traffic
RIVAL = "#7d8590"  # a reference, e.g. local-only
CONTENDERS = (  # methods next to each other, as distinguishable as possible
    OURS,
    START,
    UP,
    DOWN,
    "#b8860b",
    "#2f9fd8",
    "#332288",
    "#cc6677",
    "#6b8e23",
    "#882255",
)
SETTINGS: Any = {  # for `matplotlib.rc_context`; the type of its keys depends on matplotlib's version
    "figure.facecolor": GROUND,
    "axes.facecolor": GROUND,
    "savefig.facecolor": GROUND,
    "text.color": INK,
    "axes.labelcolor": FAINT,
    "axes.edgecolor": GRID,
    "axes.titlelocation": "left",
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlepad": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.color": GRID,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": FAINT,
    "ytick.labelcolor": FAINT,
    "font.size": 11,
    "legend.frameon": False,
    "figure.constrained_layout.w_pad": 0.12,
    "figure.constrained_layout.h_pad": 0.1,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "text.parse_math": False,
}
_TITLE_LETTERS = 56  # length of a line of a title
_LABEL_IN, _AROUND_IN = 0.24, 1.1  # height of a line of text; height of title and axis together
_MOST_APART = 0.07
_FEW_POINTS = 15  # largest number of points that are drawn as markers
_FEW_CURVES = 5  # largest number of curves with distinguishable bands


@dataclass(frozen=True)
class Curve:
    """A line of a plot with a label at its end.

    Attributes:
        label: text at the end.
        y: values; the last is marked with a dot.
        x: position of each value; () draws a horizontal line at the last value.
        colour, dashes: the look of the line, as matplotlib names it.
        band: half the height of the band around each value; () for no band.
    """

    label: str
    y: Sequence[float]
    x: Sequence[float] = ()
    colour: str = OURS
    dashes: Any = "-"
    band: Sequence[float] = ()


def blank(title: str, x_label: str, y_label: str, *, height_in: float = 3.6) -> tuple[Figure, Axes]:
    """Return an empty plot. Call this function, and draw, inside `rc_context(SETTINGS)`."""
    figure = Figure(figsize=(6.4, height_in), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(fill(title, _TITLE_LETTERS))
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.tick_params(length=0)
    return figure, axes


def draw_curves(axes: Axes, curves: Sequence[Curve], *, percent: bool = False) -> None:
    """Draw curves with their labels; `percent` limits the axis to the range from 0 to 100."""
    for one in curves:
        if not one.x:
            axes.axhline(one.y[-1], color=one.colour, linestyle=(0, (1, 2)))
            continue
        marker = "o" if len(one.x) <= _FEW_POINTS else ""
        axes.plot(one.x, one.y, color=one.colour, linestyle=one.dashes, marker=marker, zorder=3)
        axes.plot(one.x[-1], one.y[-1], "o", color=one.colour, markersize=7, zorder=4, clip_on=False)
        if one.band:
            low, high = ([y + sign * w for y, w in zip(one.y, one.band, strict=True)] for sign in (-1, 1))
            alpha = 0.14 if len(curves) <= _FEW_CURVES else 0.06
            axes.fill_between(one.x, low, high, color=one.colour, alpha=alpha, linewidth=0)
    if percent:
        low_y, high_y = axes.get_ylim()
        axes.set_ylim(max(low_y, -2.0), min(high_y, 102.0))
    label_ends(axes, [(one.y[-1], one.label, one.colour) for one in curves])


def label_ends(axes: Axes, labels: Sequence[tuple[float, str, str]]) -> None:
    """Write (y, text, colour) right of the plot at the height of each line's end, without overlaps.

    Call this after the limits of the y axis are final.
    """
    low, high = axes.get_ylim()
    drawn_in = axes.get_figure(root=True).get_figheight() - _AROUND_IN  # type: ignore[union-attr]
    gap = min(_MOST_APART, _LABEL_IN / drawn_in) * (high - low)
    heights = _apart([y for y, _, _ in labels], gap, low, high)
    for (_, text, colour), height in zip(labels, heights, strict=True):
        axes.annotate(
            text,
            (1, height),
            xycoords=("axes fraction", "data"),
            xytext=(9, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            annotation_clip=False,
        )


def png(figure: Figure) -> bytes:
    """Return the figure as the bytes of a PNG file."""
    buffer = io.BytesIO()
    with rc_context(SETTINGS):
        figure.savefig(buffer, format="png", dpi=160)
    return buffer.getvalue()


def _apart(heights: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return the heights moved so that neighbours are at least `gap` apart.

    All results are at most `high` and, if there is room, at least `low`.
    """
    order = sorted(range(len(heights)), key=lambda index: heights[index], reverse=True)
    moved = list(heights)
    ceiling = high
    for index in order:
        moved[index] = ceiling = min(moved[index], ceiling)
        ceiling -= gap
    floor = min(low, high - gap * (len(heights) - 1))
    for index in reversed(order):
        moved[index] = floor = max(moved[index], floor)
        floor += gap
    return moved
