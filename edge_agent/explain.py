"""`edge-agent explain`: every ratio a device could run at, held against its limits."""

from collections.abc import Iterator

from rich.console import Group
from rich.table import Table

from edge_agent.allowance import Allowance
from edge_agent.budget import Verdict
from edge_agent.policy import Limits, objection
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
    table = Table(title=f"a round of {allowance.report.device} as {allowance.board.title}")
    for heading in (
        "ratio",
        "down",
        "up",
        "download",
        "training",
        "upload",
        "of time",
        "memory",
        "energy",
        "",
    ):
        table.add_column(heading, justify="right")
    for verdict in allowance.explained(conditions):
        style = "bold" if verdict.choice.ratio == allowance.report.ratio else None
        table.add_row(*_cells(verdict, limits), style=style)
    return Group(table, *_lines(allowance, conditions))


def _cells(verdict: Verdict, limits: Limits) -> Iterator[str]:
    took: Footprint = verdict.predicted
    yield f"{verdict.choice.ratio:g}"
    yield _amount(took.bytes_down, 1e6, "MB")
    yield _amount(took.bytes_up, 1e6, "MB")
    yield _amount(took.download_s, 1, "s")
    yield _amount(took.train_s, 1, "s")
    yield _amount(took.upload_s, 1, "s")
    yield _of(took.known_s, limits.deadline_s, 1, "s")
    yield _of(took.memory_bytes, limits.memory_bytes, 1e6, "MB")
    yield _of(took.joules, limits.joules, 1, "J")
    yield "fits" if verdict.share <= 1 else f"too much {verdict.binds}"


def _amount(value: float | None, unit: float, name: str) -> str:
    return UNKNOWN if value is None else f"{value / unit:.3g} {name}"


def _of(value: float | None, limit: float | None, unit: float, name: str) -> str:
    amount = _amount(value, unit, name)
    return amount if limit is None else f"{amount} of {limit / unit:.4g}"


def _lines(allowance: Allowance, conditions: Conditions) -> Iterator[str]:
    rounds = len(allowance.experience.lessons)
    yield allowance.report.reason
    yield f"corrected by {rounds} past rounds" if rounds else "by the board's profile: no round was done yet"
    against = objection(allowance.policy, conditions, allowance.board)
    if against:
        yield f"[bold]it does not train just now[/]: {against}"
