"""The live view of a run: a screen for a terminal, and one log line for each round.

This module does no I/O and reads no clock.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fleetune.coordinator.metrics import readable
from fleetune.coordinator.metrics.adoption import adoption_of_reply, adoption_over, adoption_texts
from fleetune.coordinator.metrics.diagnostics import diagnostics_line
from fleetune.coordinator.metrics.metric import Metric, unit_of
from fleetune.coordinator.metrics.registry import (
    AFTER,
    BEFORE,
    BYTES_DOWN,
    BYTES_UP,
    DURATION,
    PREDICTED,
    shown_at,
)
from fleetune.coordinator.queries.run_status import DeviceStatus, Doing, RunStatus
from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.protocols.methods import diagnostics_of
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.tasks import task_of
from fleetune.protocols.tasks.scores import Score

_STYLES: dict[Doing, str] = {
    "sending": "cyan",
    "training": "yellow",
    "evaluating": "yellow",
    "receiving": "cyan",
    "working": "yellow",
    "declined": "red",
    "replied": "green",
    "ready": "",
    "left": "dim",
    "refused": "red",
    "away": "dim",
}
_ORDER = {doing: place for place, doing in enumerate(_STYLES)}
_BARS = "▁▂▃▄▅▆▇█"
_CURVE_LENGTH = 30
_LABEL = 8  # width of the labels in the head, in characters
_BY_HAND = {one.name for one in (BEFORE, AFTER, BYTES_UP, BYTES_DOWN, DURATION, PREDICTED)}
_ROOM_FOR_TIMES, _ROOM_FOR_REASONS = 100, 150  # columns of the terminal


@dataclass(frozen=True)
class LiveView:
    """The view of a run on a terminal, as an object that rich prints within the terminal's height."""

    status: RunStatus
    devices: tuple[DeviceStatus, ...] = ()

    def render(self, *, width: int = 80, height: int = 40) -> RenderableType:
        """Return the view in fewer than `height` lines, but with at least its head and one device.

        If `width` columns suffice, the view also shows each device's predictions and the reason for its
        ratio.
        """
        shot = self.status
        bar = [] if shot.rounds is None else [_progress(shot, shot.rounds)]
        head = [_title(shot), _round(shot, self.devices), *bar, _times(shot), _score(shot), _traffic(shot)]
        if shot.adoption is not None:
            head.append(_line((f"adopted   {', '.join(adoption_texts(shot.adoption, shot.score))}", "")))
        if shot.privacy is not None:
            head.append(_line((f"privacy   {shot.privacy.words}", "")))
        if shot.versions:
            head.append(_line((f"versions  {shot.versions}", "")))
        if shot.diagnostics:
            head.append(_line((f"diagnostics  {shot.diagnostics}", "")))
        if shot.refused:
            kinds = ", ".join(f"{count} {kind}" for kind, count in _refused(shot).items())
            head.append(_line((f"refused   {kinds}", "")))
        if shot.problem:
            head.append(_line((shot.problem, "bold red")))
        around = 4  # a blank line, the table's header, the line on the rest, the cursor's
        return Group(*head, Text(), *_devices(self, max(1, height - len(head) - around), width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.render(width=options.max_width, height=options.height or console.height)


def plain_line(record: RoundRecord, settings: RunSettings) -> str:
    """Return a closed round as one line of ASCII, for logs and for output that is no terminal."""
    last = "" if settings.run.is_open else f"/{settings.run.rounds}"
    what = "final evaluation" if record.final_evaluation else f"round {record.number}{last}"
    if record.attempt > 1:
        what += f" attempt {record.attempt}"
    diagnosed = diagnostics_line(record, diagnostics_of(settings.method), plain=True)
    after = AFTER.for_score(task_of(settings.task).score)
    return "  ".join(
        [
            what,
            f"{len(record.devices)}/{len(record.participants)} replied",
            f"{after.head} {_plain(BEFORE.of_round(record))} -> {_plain(AFTER.of_round(record))}",
            *(_named(name, one, record) for name, one in (("up", BYTES_UP), ("down", BYTES_DOWN))),
            DURATION.unit.text(DURATION.of_round(record)),
            *(_named(one.head, one, record) for one in shown_at("live", _BY_HAND)),
            *([] if record.epsilon is None else [f"epsilon {record.epsilon:.3g}"]),
            *_adopted(record),
            *([f"diagnostics: {diagnosed}"] if diagnosed else []),
        ]
    )


def _named(name: str, metric: Metric, record: RoundRecord) -> str:
    value = metric.unit.text(metric.of_round(record)).replace(readable.UNKNOWN, "-")
    return f"{name} {value}"


def _adopted(record: RoundRecord) -> list[str]:
    """Return the number of replying devices that deploy a fleet model, as text; [] if none reports it."""
    found = adoption_over([one for reply in record.devices.values() if (one := adoption_of_reply(reply))])
    return [] if found is None else [f"adopted {found.adopted}/{found.devices}"]


def sparkline(values: Sequence[float]) -> str:
    """Return the values as a row of bar characters, scaled between the smallest and the largest value."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    steps = len(_BARS) - 1
    return "".join(
        _BARS[round(steps * (value - low) / (high - low)) if high > low else 0] for value in values
    )


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _title(shot: RunStatus) -> Text:
    return _line((shot.run, "bold"), (f" · {shot.method}", "dim"))


def _round(shot: RunStatus, devices: Sequence[DeviceStatus]) -> Text:
    number = f"round {shot.round}" if shot.rounds is None else _of(shot.round, shot.rounds)
    if shot.attempt > 1:
        number += f", attempt {shot.attempt}"
    left = "" if shot.round_left_s is None else f", {readable.duration(max(0.0, shot.round_left_s))} left"
    left += "" if shot.round_span_s is None else f" of {readable.duration(shot.round_span_s)}"
    if not shot.running and shot.stage != "finished":
        return _line((number, "bold"), ("  stopped: no coordinator serves the run", "yellow"))
    replies = f"{shot.replied} of {shot.asked} replied" + (
        f" (closes with {shot.target})" if shot.target < shot.asked else ""
    )
    match shot.stage:
        case "waiting" if shot.scheduled:
            return _line((number, "bold"), (f"  {shot.scheduled}", "yellow"))
        case "waiting":
            there = sum(line.doing not in ("away", "refused", "left") for line in devices)
            return _line(
                (number, "bold"),
                (f"  waiting for devices: {there} there, needs {shot.needed}", "yellow"),
            )
        case "training" | "aggregating":
            return _line((number, "bold"), (f"  training: {replies}{left}", ""))
        case "evaluating":
            return _line(("final evaluation", "bold"), (f"  one more round on a copy: {replies}{left}", ""))
        case "finished":
            last = f"  after round {shot.scores[-1].number}" if shot.scores else ""
            return _line(("finished", "bold green"), (last, ""))


def _refused(shot: RunStatus) -> Counter[str]:
    """Return the numbers of refused messages, by word; `PacketForeign` and `foreign` are one."""
    found: Counter[str] = Counter()
    for kind, count in shot.refused.items():
        found[kind.removeprefix("Packet").lower()] += count
    return found


def _of(number: int, rounds: int) -> str:
    return f"round {min(number, rounds)} of {rounds}"


def _progress(shot: RunStatus, rounds: int) -> RenderableType:
    within = shot.replied / shot.target if shot.stage == "training" and shot.target else 0.0
    over = shot.stage in ("evaluating", "finished")
    done = rounds if over else shot.round - 1 + min(1.0, within)
    bar = Table.grid(padding=(0, 1))
    bar.add_row(ProgressBar(total=rounds, completed=done, width=50), f"{done / rounds:.0%}")
    return bar


def _times(shot: RunStatus) -> Text:
    left = "" if shot.remaining_s is None else f", about {readable.duration(shot.remaining_s)} left"
    return Text(f"time      {readable.duration(shot.elapsed_s)}{left}")


def _score(shot: RunStatus) -> Text:
    name = f"{shot.score.title}  " if len(shot.score.title) > _LABEL else shot.score.title.ljust(_LABEL + 2)
    if not shot.scores:
        return Text(f"{name}{readable.UNKNOWN}")
    last = shot.scores[-1]
    after = [point.after for point in shot.scores[-_CURVE_LENGTH:] if point.after is not None]
    return _line(
        (f"{name}{unit_of(shot.score).change(last.before, last.after)}  ", ""),
        (sparkline(after), "blue"),
        (f"  before → after local training, round {last.number}", "dim"),
    )


def _traffic(shot: RunStatus) -> Text:
    directions = ("up", shot.bytes_up, shot.dense_up), ("down", shot.bytes_down, shot.dense_down)
    parts = [
        f"{direction} {readable.size(count)}" + (f" ({readable.percent(count / dense)})" if dense else "")
        for direction, count, dense in directions
    ]
    return _line(
        ("bytes     " + ", ".join(parts), ""), ("  share of whole models" if shot.dense_up else "", "dim")
    )


def _devices(view: LiveView, room: int, width: int) -> list[RenderableType]:
    """Return a table of the devices; if they do not fit, it shows the busiest and counts the rest in one
    line.
    """
    devices = view.devices
    if not devices:
        return [Text("no device yet", "dim")]
    shown: Sequence[DeviceStatus] = devices
    if len(devices) > room:
        shown = sorted(devices, key=lambda line: (_ORDER[line.doing], line.device))[:room]
    names = {line.device for line in shown}
    rest = Counter(line.doing for line in devices if line.device not in names)
    parts: list[RenderableType] = [_table(shown, width, view.status.score)]
    if rest:
        counts = ", ".join(f"{count} {doing}" for doing, count in rest.most_common())
        parts.append(_line((f"and {rest.total()} more: {counts}", "dim")))
    return parts


def _table(lines: Sequence[DeviceStatus], width: int, score: Score) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    times, reasons = width >= _ROOM_FOR_TIMES, width >= _ROOM_FOR_REASONS
    metrics = [metric.for_score(score) for metric in shown_at("live", _BY_HAND)]
    columns = ["device", "board", "p", "doing", AFTER.for_score(score).head, "up", "down"]
    for name in [
        *columns,
        *(one.head for one in metrics),
        *["took / predicted"] * times,
        *["why this p"] * reasons,
    ]:
        # columns that are dropped first on a narrow screen
        named = name in ("device", "board", "doing", "why this p")
        table.add_column(name, justify="left" if named else "right", no_wrap=not named, max_width=64)
    for line in lines:
        table.add_row(
            _line((str(line.identity), "")),
            _line((readable.short_board(line.board), "")),
            readable.ratio(line.ratio),
            _doing(line),
            unit_of(score).change(line.before, line.after),
            BYTES_UP.unit.text(line.bytes_up),
            BYTES_DOWN.unit.text(line.bytes_down),
            *(metric.unit.text(line.metrics.get(metric.name)) for metric in metrics),
            *([readable.against(line.actual_s, line.predicted_s)] * times),
            *([_line((line.ratio_reason, "dim"))] * reasons),
        )
    return table


def _doing(line: DeviceStatus) -> Text:
    done = "" if line.progress is None else f" {100 * line.progress:.0f} %"
    why = f": {line.reason}" if line.reason else ""
    return _line((line.doing + done + why, _STYLES[line.doing]))


def _line(*parts: tuple[str, str]) -> Text:
    """Join styled texts into one line that is cut at the terminal's width."""
    return Text.assemble(
        *((readable.printable(text), style) for text, style in parts), overflow="ellipsis", no_wrap=True
    )
