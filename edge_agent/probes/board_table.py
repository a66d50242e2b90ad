"""Prints the board profiles: all in a table, or one with the source of every figure."""

from collections.abc import Iterable

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from fleetune.firmware_profiles import Board
from fleetune.firmware_profiles.schema import ESTIMATE, Figure, stated

_MARK = "~"
_COLUMNS = (
    "cores",
    "memory\nGiB",
    "speed\nGFLOPS",
    "up/down\nMbit/s",
    "idle/train\nW",
    "limit\n°C",
)


def all_boards(boards: Iterable[Board]) -> Group:
    """Return a table with one row for each board and its main figures. Estimates are marked."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=0)
    table.add_column("board", no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for board in boards:
        table.add_row(board.name, *_main_figures(board))
    note = f"{_MARK} marks an estimate. Every figure with its source: edge-agent boards NAME"
    return Group(table, Text(note, style="dim"))


def one_board(board: Board) -> str:
    """Return one line for each figure of a board: its value, its source, and how it was found."""
    figures = stated(board.profile.figures)
    width = max(map(len, figures))
    lines = (f"{key:{width}}  {_cell(figure)}" for key, figure in figures.items())
    return "\n".join([f"{board.name}: {board.title}", *lines])


def _main_figures(board: Board) -> list[str]:
    figures = board.profile.figures
    return [
        _marked(figures.cores),
        _marked(figures.memory_mib, 1024),
        _marked(figures.training_gflops),
        f"{_marked(figures.uplink_mbps)}/{_marked(figures.downlink_mbps)}",
        f"{_marked(figures.idle_w)}/{_marked(figures.train_w)}",
        _marked(figures.max_celsius),
    ]


def _marked(figure: Figure[int] | Figure[float], divisor: int = 1) -> str:
    return f"{_MARK if figure.source == ESTIMATE else ''}{figure.value / divisor:g}"


def _cell(figure: Figure[object]) -> str:
    value = ", ".join(figure.value) if isinstance(figure.value, tuple) else str(figure.value)
    note = f" ({figure.note})" if figure.note else ""
    return f"{value or 'none':10}  {figure.source}{note}"
