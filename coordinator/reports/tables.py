"""Who is in a run and what it came to, as tables for the terminal."""

from collections.abc import Mapping
from textwrap import wrap

from msgspec import UNSET
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fleetune.coordinator.metrics import readable
from fleetune.coordinator.metrics.metric import Unit, unit_of
from fleetune.coordinator.metrics.personal_scores import (
    Column,
    better_by,
    column,
    gains,
    other_device_columns,
    other_run_columns,
    personal,
    prediction_rows,
    ratio_of,
    yardstick,
)
from fleetune.coordinator.metrics.registry import (
    AFTER,
    AFTER_MEAN,
    BEFORE,
    BEFORE_MEAN,
    BYTES_DOWN,
    BYTES_UP,
    DURATION,
    PERSONAL,
    PERSONAL_MEAN,
    PERSONAL_WEIGHTED,
    PERSONAL_WORST,
    SAMPLES,
    SERVED,
    SHARE_DOWN,
    SHARE_UP,
)
from fleetune.coordinator.metrics.summary import Summary
from fleetune.coordinator.reports.progress import DeviceView, view_devices
from fleetune.coordinator.rounds.engine_state import EngineState
from fleetune.protocols.method.method import DeviceId

_SHORT = 16  # letters of a name that stays in one line
_NARROW = 9
_RUN = (
    column(PERSONAL_MEAN, "run table"),
    column(PERSONAL_WEIGHTED, "run table"),
    column(PERSONAL_WORST, "run table"),
    Column("one more\nround", (BEFORE_MEAN, AFTER_MEAN), readable.change),
    Column("up\nof dense", (BYTES_UP, SHARE_UP)),
    Column("down\nof dense", (BYTES_DOWN, SHARE_DOWN)),
    column(DURATION, "run table"),
)
_SAMPLES = column(SAMPLES, "device table")
_PERSONAL = column(PERSONAL, "device table")
_ONE_MORE = Column("one more\nround", (BEFORE, AFTER), readable.change)
_SERVED = column(SERVED, "device table")
_SENT = (column(BYTES_UP, "device table"), column(BYTES_DOWN, "device table"))


def run_table(summary: Summary, rivals: Mapping[str, Summary] | None = None) -> Table:
    """The run and its rivals, a row a method, the run last.

    Accuracies are those of the devices' personal models; "one more round" is what the final evaluation did to
    them: before and after local training.
    """
    others = other_run_columns("run table", _RUN, [*(rivals or {}).values(), summary])
    columns = [one.seen_as(summary.judged_by) for one in (*_RUN, *others)]
    table = _table("method", *(one.head for one in columns))
    for name, rival in (rivals or {}).items():
        table.add_row(name, *(one.of_run(rival) for one in columns))
    table.add_row(summary.method, *(one.of_run(summary) for one in columns), style="bold")
    lines = [f"personal models: {summary.who_took_part}"] if summary.who_took_part else []
    if summary.ended is not UNSET:
        lines.append(f"training is over: {summary.ended}")
    if lines:
        table.caption = readable.printable("; ".join(lines))
    table.columns[len(_RUN)].no_wrap = False  # "1 min 10 s" goes into two lines before a name does
    table.columns[0].no_wrap = max(map(len, [summary.method, *(rivals or {})])) <= _SHORT
    return table


def device_table(
    summary: Summary,
    rivals: Mapping[str, Summary] | None = None,
    *,
    boards: Mapping[DeviceId, str] | None = None,
    limit: int = 40,
) -> Table:
    """A row a device; of more than `limit` devices those that do worst. Names that are too long for the
    terminal take more lines; what devices serve is shown where that is not their accuracy anyway, in a run
    with [adoption] in place of what one more round does.

    Args:
        summary: of the run.
        rivals: the method's name and its summary; with them, what each device gained over local-only.
        boards: of the devices.
        limit: rows at most.
    """
    rivals, boards = rivals or {}, boards or {}
    rival = yardstick(rivals)
    theirs = personal(rivals[rival]) if rival else {}
    gained = gains(summary, rivals[rival]) if rival else {}
    serves_others = any(row.kept not in (None, row.personal) for row in summary.by_device.values())
    score = summary.judged_by
    own, one_more, served = (one.seen_as(score) for one in (_PERSONAL, _ONE_MORE, _SERVED))
    tells = summary.adoption is not UNSET  # what is served then matters more than one more round would
    alone = [own, *[one_more] * (not tells), *[served] * serves_others]
    heads = [_in_two(rival), _in_two(summary.method), "gain"] if rival else [one.head for one in alone]
    by_hand = [*_SENT, _SAMPLES, _PERSONAL, _ONE_MORE, _SERVED]
    last = [*_SENT, *other_device_columns("device table", by_hand, summary.by_device.values())]
    grouped = any(row.group is not UNSET for row in summary.by_device.values())
    first = ["device", *["group"] * grouped, "board"]
    table = _table(*first, "p", _SAMPLES.head, *heads, *(one.head for one in last), left=len(first))
    shown = _worst_first(summary)[:limit] if len(summary.by_device) > limit else summary.by_device
    for device in shown:
        row = summary.by_device[device]
        rivals_own = unit_of(score).text(theirs.get(device))
        beside = [rivals_own, own.of_device(row), _coloured(gained.get(device), unit_of(score))]
        table.add_row(
            readable.printable(device),
            *[readable.printable(row.group or readable.UNKNOWN)] * grouped,
            readable.short_board(boards.get(device, readable.UNKNOWN)),
            readable.ratio(ratio_of(summary, device)),
            _SAMPLES.of_device(row),
            *(beside if rival else [one.of_device(row) for one in alone]),
            *(one.of_device(row) for one in last),
        )
    if len(summary.by_device) > limit:
        table.caption = f"the {limit} of {len(summary.by_device)} devices that do worst; report.html has all"
    return table


def prediction_table(summary: Summary) -> Table | None:
    """How far devices' predictions were off, a row a quantity; None: nobody predicted anything."""
    rows = prediction_rows(summary)
    if not rows:
        return None
    table = _table(
        "predicted", "replies", "median\nerror", "worst\ndecile", "median after\n5 rounds", "worst\ndecile"
    )
    for cells in rows:
        table.add_row(*cells)
    return table


def fleet_table(state: EngineState) -> Table:
    """A row a device: what it said of itself, and what became of it in the run."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for head in (
        "device",
        "board",
        "agent",
        "p",
        "samples",
        "a round\ntakes",
        "conditions",
        "why this p",
        "stands",
    ):
        right = head in ("p", "samples", "a round\ntakes")
        table.add_column(head, justify="right" if right else "left", overflow="fold")
    for view in view_devices(state):
        said = view.report
        cells = [
            readable.short_board(said.board) if said else readable.UNKNOWN,
            state.members[view.device].agent.removeprefix("fleetune ") or readable.UNKNOWN,
            readable.ratio(said.ratio if said else None),
            str(said.num_samples) if said else readable.UNKNOWN,
            readable.duration(said.round_s if said else None),
            readable.conditions(said.conditions) if said else readable.UNKNOWN,
            said.reason if said else readable.UNKNOWN,
            _stands(view, state),
        ]
        table.add_row(*(Text(readable.printable(cell)) for cell in (view.device, *cells)))
    return table


def _stands(view: DeviceView, state: EngineState) -> str:
    member = state.members[view.device]
    if member.refusal is not None:
        return f"refuses the run: {member.refusal}"
    declined = f"declined round {member.declined_round}: {member.declined_reason}"
    if view.part == "declined":
        return declined
    stands = "left" if member.left else view.part if member.ready else "away"
    return f"{stands}; {declined}" if member.declined_round else stands


def _table(*heads: str, left: int = 1) -> Table:
    table = Table(
        box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True, caption_justify="left"
    )
    for index, head in enumerate(heads):
        table.add_column(
            head, justify="left" if index < left else "right", overflow="fold", no_wrap=index >= left
        )
    return table


def _in_two(name: str) -> str:
    """A method's name as the head of a narrow column."""
    return "\n".join(wrap(readable.clip(name, 2 * _NARROW - 2), _NARROW))


def _worst_first(summary: Summary) -> list[DeviceId]:
    rows, sign = summary.by_device, better_by(summary.judged_by)
    return sorted(
        rows, key=lambda device: (rows[device].personal is None, sign * (rows[device].personal or 0.0))
    )


def _coloured(gain: float | None, unit: Unit) -> Text:
    style = "" if not gain else "green" if gain > 0 else "red"
    return Text(unit.gain(gain), style)
