"""Look of the plots: two themes, colours that colour-blind readers can distinguish, and labels at the
lines.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend

from fleetune.coordinator.reports.pictures.text_fit import fit

WIDTH_IN = 6.4
_TITLE_PAD = 12  # points between a title and the element below it


@dataclass(frozen=True)
class Theme:
    """Colours (after Okabe and Ito) by what they stand for.

    Attributes:
        ground, ink, faint, grid: background, text, axes and references, grid lines.
        ours: the run: personal accuracy, after local training.
        start: before local training; also a loss.
        up, down: traffic.
        rival: another method.
        contenders: methods side by side, apart from each other as far as it goes.
    """

    ground: str
    ink: str
    faint: str
    grid: str
    ours: str
    start: str
    up: str
    down: str
    rival: str
    contenders: tuple[str, ...]

    @property
    def settings(self) -> Any:
        """Settings for `matplotlib.rc_context`; the type of their keys depends on matplotlib's version."""
        return {
            "figure.facecolor": self.ground,
            "axes.facecolor": self.ground,
            "savefig.facecolor": self.ground,
            "text.color": self.ink,
            "axes.labelcolor": self.faint,
            "axes.edgecolor": self.grid,
            "axes.titlecolor": self.ink,
            "axes.titlelocation": "left",
            "axes.titlesize": 12,
            "axes.titleweight": "bold",
            "axes.titlepad": _TITLE_PAD,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.formatter.useoffset": False,
            "grid.color": self.grid,
            "grid.linewidth": 0.8,
            "xtick.color": self.grid,
            "ytick.color": self.grid,
            "xtick.labelcolor": self.faint,
            "ytick.labelcolor": self.faint,
            "font.size": 11,
            "legend.frameon": False,
            "figure.constrained_layout.w_pad": 0.12,
            "figure.constrained_layout.h_pad": 0.1,
            "lines.linewidth": 2.0,
            "lines.markersize": 5,
            "text.parse_math": False,
            "svg.hashsalt": "fleetune",
        }


LIGHT = Theme(
    ground="#ffffff",
    ink="#1b1f24",
    faint="#57606a",
    grid="#e3e6ea",
    ours="#0072b2",
    start="#d55e00",
    up="#00845e",
    down="#aa4499",
    rival="#7d8590",
    contenders=(
        "#0072b2",
        "#d55e00",
        "#00845e",
        "#aa4499",
        "#b8860b",
        "#2f9fd8",
        "#332288",
        "#cc6677",
        "#6b8e23",
        "#882255",
    ),
)
DARK = Theme(
    ground="#161b22",
    ink="#e6edf3",
    faint="#9da7b3",
    grid="#30363d",
    ours="#56b4e9",
    start="#e69f00",
    up="#2ec4a0",
    down="#e39ac2",
    rival="#8b949e",
    contenders=(
        "#56b4e9",
        "#f08a3c",
        "#2ec4a0",
        "#e39ac2",
        "#e6c34a",
        "#a5d8ff",
        "#9d8df1",
        "#ff9a9a",
        "#b5cf6b",
        "#c77dab",
    ),
)


_LABEL_IN, _AROUND_IN = 0.24, 1.1  # a line of text; what of a figure's height is title and axis
_MOST_APART = 0.07


def blank(title: str, x_label: str, y_label: str, *, height_in: float = 3.6) -> tuple[Figure, Axes]:
    """An empty plot. Call this, and draw, inside `rc_context(theme.settings)`."""
    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.tick_params(length=0)
    return figure, axes


def label_ends(axes: Axes, labels: Sequence[tuple[float, str, str]], *, lines: int = 1) -> None:
    """Write (y, text, colour) at the right of the plot, at the height of each line's end, without overlaps.

    Call it after the limits of y are final; `lines` is the number of lines in a label.
    """
    low, high = axes.get_ylim()
    drawn_in = axes.get_figure(root=True).get_figheight() - _AROUND_IN  # type: ignore[union-attr]
    gap = lines * min(_MOST_APART, _LABEL_IN / drawn_in) * (high - low)
    heights = _apart([y for y, _, _ in labels], gap, low, high)
    for (_, text, colour), height in zip(labels, heights, strict=True):
        axes.annotate(
            text,
            (1, height),
            xycoords=("axes fraction", "data"),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            annotation_clip=False,
        )


def name_above(axes: Axes, title: str) -> Legend:
    """Put a legend above the plot and the title above the legend. Call it last.

    The legend's entries are side by side if there is room.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None, "axes stand in a figure"
    for ncols in 2, 1:
        legend = axes.legend(
            loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=ncols, borderpad=0, handletextpad=0.2
        )
        legend.set_in_layout(False)  # otherwise a wide legend would leave the plot no room in the layout
        figure.draw_without_rendering()
        extent = legend.get_window_extent()
        if extent.x1 <= figure.bbox.width:
            break
    legend.set_in_layout(True)
    axes.set_title(title, pad=_TITLE_PAD + (extent.y1 - axes.bbox.y1) * 72 / figure.dpi)
    return legend


def picture(figure: Figure, theme: Theme, kind: Literal["png", "svg"]) -> bytes:
    """The figure as a file. An SVG is the same on every call."""
    buffer = io.BytesIO()
    with rc_context(theme.settings):
        fit(figure)
        figure.savefig(buffer, format=kind, dpi=160, metadata={"Date": None} if kind == "svg" else None)
    return buffer.getvalue()


def _apart(heights: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The heights moved until each two are `gap` apart, all at most `high` and, if there is room, at
    least `low`.
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
