"""`edge-agent explain`: every ratio a device could run at, held against its limits."""

from collections.abc import Callable, Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table

from edge_agent.allowance import Allowance
from edge_agent.budget import Verdict
from edge_agent.policy import objection
from protocols.conditions import Conditions
from protocols.footprint import Footprint

UNKNOWN = "unknown"


def explanation(allowance: Allowance, conditions: Conditions) -> Group:
    """Table and verdict, for a terminal.

    Args:
        allowance: as the agent keeps it.
        conditions: of the board, just now.
    """
    limits = allowance.limits(conditions)
    table = Table(title=f"a round of {allowance.report.device} as {allowance.board.title}", box=SIMPLE_HEAD)
    of_time, of_memory, of_energy = (
        _heading("time", limits.deadline_s, _seconds),
        _heading("memory", limits.memory_bytes, _size),
        _heading("energy", limits.joules, _joules),
    )
    for heading in ("p", "down", "up", "download", "training", "upload", of_time, of_memory, of_energy, ""):
        table.add_column(heading, justify="right")
    for verdict in allowance.explained(conditions):
        chosen = allowance.fits and verdict.choice.ratio == allowance.report.ratio
        table.add_row(*_cells(verdict), style="bold" if chosen else None)
    return Group(table, *_lines(allowance, conditions))


def _heading(name: str, limit: float | None, shown: Callable[[float | None], str]) -> str:
    return f"{name}\nof {shown(limit)}" if limit is not None else f"{name}\nunlimited"


def _cells(verdict: Verdict) -> Iterator[str]:
    took: Footprint = verdict.predicted
    yield f"{verdict.choice.ratio:g}"
    yield _size(took.bytes_down)
    yield _size(took.bytes_up)
    yield _seconds(took.download_s)
    yield _seconds(took.train_s)
    yield _seconds(took.upload_s)
    yield _seconds(took.known_s)
    yield _size(took.memory_bytes)
    yield _joules(took.joules)
    yield "fits" if verdict.share <= 1 else f"too much {verdict.binds}"


def _size(num_bytes: float | None) -> str:
    if num_bytes is None:
        return UNKNOWN
    exponent = next((n for n in (3, 2, 1) if num_bytes >= 1000**n), 0)
    return f"{num_bytes / 1000**exponent:.3g} {('B', 'kB', 'MB', 'GB')[exponent]}"


def _seconds(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else f"{seconds:.3g} s"


def _joules(joules: float | None) -> str:
    return UNKNOWN if joules is None else f"{joules:.3g} J"


def _lines(allowance: Allowance, conditions: Conditions) -> Iterator[str]:
    rounds = len(allowance.experience.lessons)
    yield allowance.report.reason
    yield f"corrected by {rounds} past rounds" if rounds else "by the board's profile: no round was done yet"
    against = objection(allowance.policy, conditions, allowance.board)
    if against:
        yield f"[bold]it does not train just now[/]: {against}"
