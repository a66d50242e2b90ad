"""Fit text into a figure: a title that is too wide moves left to the edge, then wraps."""

from collections.abc import Callable, Iterator

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import blended_transform_factory

_EDGE_IN = 0.08
_POINTS_AN_IN, _LINE = 72, 1.25  # height of a line, relative to the font size


def fit(figure: Figure) -> None:
    """Lay out the figure so that its titles lie inside. Titles that already fit stay; a second call changes
    nothing.
    """
    for axes in figure.axes:
        if axes.get_title(loc="left"):
            _fit_title(figure, axes)


def _fit_title(figure: Figure, axes: Axes) -> None:
    figure.draw_without_rendering()
    title, edge = _title(axes), _EDGE_IN * figure.dpi
    right = figure.bbox.width - edge
    if title.get_window_extent().x1 <= right:
        return
    lines = list(_lines(title.get_text(), right - edge, lambda words: _width(title, words)))
    title.set_text("\n".join(lines))
    more = (len(lines) - 1) * _LINE * title.get_fontproperties().get_size_in_points()
    figure.set_figheight(figure.get_figheight() + more / _POINTS_AN_IN)
    across = figure.dpi_scale_trans  # in inches, because each drawing repeats the layout and moves the axes
    title.set_transform(blended_transform_factory(across, title.get_transform()))
    title.set_x(_EDGE_IN)


def _title(axes: Axes) -> Text:
    content = axes.get_title(loc="left")
    return next(
        child for child in axes.get_children() if isinstance(child, Text) and child.get_text() == content
    )


def _width(title: Text, content: str) -> float:
    """Width of `content` in pixels in the title's style. Side effect: the title's text becomes `content`."""
    title.set_text(content)
    return title.get_window_extent().width


def _lines(content: str, room: float, width: Callable[[str], float]) -> Iterator[str]:
    """Wrap text between words; a word longer than a line is split."""
    line = ""
    for word in content.split():
        if line and width(f"{line} {word}") > room:
            yield line
            line = ""
        line = f"{line} {word}" if line else word
        while width(line) > room:
            there = next(n for n in range(len(line) - 1, 0, -1) if n == 1 or width(line[:n]) <= room)
            yield line[:there]
            line = line[there:]
    yield line
