"""The table of `edge-agent explain`: every ratio of a device compared with its limits."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table

from fleetune.edge_agent.budget.owner_policy import reason_not_to_train
from fleetune.edge_agent.budget.ratio_controller import RatioController
from fleetune.edge_agent.budget.safety_margin import ForecastError
from fleetune.protocols.conditions import Conditions

UNKNOWN = "unknown"
WAITING = 0.8  # share of the work's seconds; below it the processor was waiting for something
_UNITS = ("B", "kB", "MB", "GB")


def explanation(ratio_controller: RatioController, conditions: Conditions) -> Group:
    """Return a table of all ratios and the reason for the present ratio.

    Args:
        ratio_controller: the device's stored controller.
        conditions: the board's present conditions.
    """
    limits, checks = ratio_controller.limits(conditions), ratio_controller.explained(conditions)
    took = [checked.predicted for checked in checks]
    name = "all" if ratio_controller.late is None else "at most"
    columns = [
        Column("p", "", [f"{checked.choice.ratio:g}" for checked in checks]),
        _sizes("down", [one.bytes_down for one in took]),
        _sizes("up", [one.bytes_up for one in took]),
        _plain("down", [one.download_s for one in took], "s"),
        _plain("train", [one.train_s for one in took], "s"),
        _plain("up", [one.upload_s for one in took], "s"),
        _plain(name, [one.within_s for one in checks], "s", _limit(limits.deadline_s, _seconds)),
        _sizes("memory", [one.memory_bytes for one in took], _limit(limits.memory_bytes, _size)),
        _plain("energy", [one.joules for one in took], "J", _limit(limits.joules, _joules)),
        Column("fits", "", ["yes" if one.share <= 1 else f"no: {one.binds}" for one in checks]),
    ]
    title = f"a round of {ratio_controller.report.device} as {ratio_controller.board.title}"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for column in columns:
        table.add_column(column.heading, justify="right", no_wrap=True)
    for checked, cells in zip(checks, zip(*(column.cells for column in columns), strict=True), strict=True):
        table.add_row(*cells, style="bold" if checked.choice.ratio == ratio_controller.report.ratio else None)
    return Group(table, *_lines(ratio_controller, conditions))


@dataclass(frozen=True)
class Column:
    """One figure of every choice. The unit is in the header, so that all columns fit into 80 characters."""

    name: str
    limit: str
    cells: Sequence[str]
    unit: str = ""

    @property
    def heading(self) -> str:
        return f"{self.name}\n{self.limit}\n{self.unit}"


def _limit(limit: float | None, shown: Callable[[float], str]) -> str:
    return "no limit" if limit is None else f"of {shown(limit)}"


def _plain(name: str, figures: Sequence[float | None], unit: str, limit: str = "") -> Column:
    return Column(name, limit, [_number(figure) for figure in figures], unit)


def _sizes(name: str, figures: Sequence[float | None], limit: str = "") -> Column:
    """Return a column of byte counts in the unit of the largest."""
    exponent = _exponent(max((figure for figure in figures if figure is not None), default=0))
    scaled = [None if figure is None else figure / 1000**exponent for figure in figures]
    return _plain(name, scaled, _UNITS[exponent], limit)


def _number(figure: float | None) -> str:
    if figure is None:
        return UNKNOWN
    return f"{figure:.0f}" if 100 <= figure < 1e7 else f"{figure:.3g}"


def _exponent(num_bytes: float) -> int:
    return next((n for n in (3, 2, 1) if num_bytes >= 1000**n), 0)


def _size(num_bytes: float) -> str:
    exponent = _exponent(num_bytes)
    return f"{_number(num_bytes / 1000**exponent)} {_UNITS[exponent]}"


def _seconds(seconds: float) -> str:
    return f"{_number(seconds)} s"


def _joules(joules: float) -> str:
    return f"{_number(joules)} J"


def _margin(late: float, errors: Sequence[ForecastError]) -> str:
    past = f"by {len(errors)} past rounds" if errors else "before any round was measured"
    cancelled = sum(one.censored for one in errors)
    noted = f", {cancelled} of them cancelled" if cancelled else ""
    return (
        f"at most: with a margin for all but {100 * late:g} % of rounds, {past}{noted}; not at the smallest p"
    )


def _lines(ratio_controller: RatioController, conditions: Conditions) -> Iterator[str]:
    rounds = len(ratio_controller.cost_history.past_rounds)
    yield ratio_controller.report.reason
    yield (
        f"corrected by {rounds} past rounds"
        if rounds
        else "by the board's profile, as no round is complete yet"
    )
    work_s, own_s = ratio_controller.predicted.train_s, ratio_controller.predicted.processor_s
    if work_s is not None and own_s is not None and own_s < WAITING * work_s:
        yield f"its work takes {_seconds(own_s)} of processor time and {_seconds(work_s - own_s)} of waiting"
    if ratio_controller.late is not None:
        yield _margin(ratio_controller.late, ratio_controller.cost_history.errors)
    if ratio_controller.proposed:
        yield "the coordinator proposes a ratio for each task; p is the largest that fits"
    against = reason_not_to_train(ratio_controller.policy, conditions, ratio_controller.board)
    if against:
        yield f"[bold]the device does not train now[/]: {against}"
