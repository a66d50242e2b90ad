"""Tables for the terminal: a run and its rivals, its devices, a fleet; also rows that only the page shows."""

import time
from collections.abc import Iterable, Mapping, Sequence
from textwrap import wrap

from msgspec import UNSET
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fleetune.coordinator.fleet.invitations import InvitationStatus
from fleetune.coordinator.metrics import readable, registry
from fleetune.coordinator.metrics.diagnostics import between, unit_of_diagnostic
from fleetune.coordinator.metrics.metric import Unit, unit_of
from fleetune.coordinator.metrics.personal_scores import baseline, better_by, gains, personal
from fleetune.coordinator.metrics.registry import (
    AFTER,
    AFTER_MEAN,
    BEFORE,
    BEFORE_MEAN,
    BYTES_DOWN,
    BYTES_UP,
    DEPLOYED,
    DURATION,
    PERSONAL,
    PERSONAL_MEAN,
    PERSONAL_WEIGHTED,
    PERSONAL_WORST,
    SAMPLES,
    SHARE_DOWN,
    SHARE_UP,
)
from fleetune.coordinator.metrics.summary import DiagnosticHistory, Errors, PredictionErrors, Summary
from fleetune.coordinator.queries.run_status import DeviceStatus
from fleetune.coordinator.reports.columns import Column, narrow, other_metrics
from fleetune.protocols import errors
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.wire.identity import Identity

_SHORT = 16  # longest name that stays on one line, in characters
_NARROW = 9
_SHOWN = 5  # devices of an invitation, or below a table
_ROOM_FOR_KNOWN_BY = 100
_LONG_ID = 24  # longest id that stays on one line where tags can wrap, in characters
_RUN = (
    *map(narrow, (PERSONAL_MEAN, PERSONAL_WEIGHTED, PERSONAL_WORST)),
    Column("one more\nround", (BEFORE_MEAN, AFTER_MEAN), readable.change),
    Column("up\nof dense", (BYTES_UP, SHARE_UP)),
    Column("down\nof dense", (BYTES_DOWN, SHARE_DOWN)),
    narrow(DURATION),
)
_SAMPLES, _PERSONAL, _DEPLOYED = map(narrow, (SAMPLES, PERSONAL, DEPLOYED))
_ONE_MORE = Column("one more\nround", (BEFORE, AFTER), readable.change)
_SENT = (Column("up", (BYTES_UP,)), Column("down", (BYTES_DOWN,)))
_OF_DEVICES = (*_SENT, _SAMPLES, _PERSONAL, _ONE_MORE, _DEPLOYED)
_REFUSED = {
    "late": "update for a round that was closed already",
    "stale": "update for an attempt that was abandoned",
    "duplicate": "second answer to the same task",
    "foreign": "update from a device that was not asked",
    "unknown": "update that was not asked for yet",
    "abandoned-deadline": "attempt at a round given up: too few had replied by the deadline",
    "abandoned-too-few": "attempt at a round given up: too few devices were left to reply",
    "declined": "round that a device declined",
    "refused": "device that would not join the run",
    "gone": "time a device went away",
    "not-admitted": "device whose agent lacks a feature that the run needs",
    "share-cut": "update that counted as fewer samples than it claimed (round.max_share)",
    "quarantined": "update that did not count, because its device is in quarantine (round.quarantine)",
}


def run_table(summary: Summary, rivals: Mapping[str, Summary] | None = None) -> Table:
    """Return a table with one row for each method: first the rivals, then the run.

    Scores are of the devices' personal models. "one more round" is the final evaluation, before and after
    local training.
    """
    runs = [*(rivals or {}).items(), (summary.method, summary)]
    others = map(narrow, other_metrics("run table", _RUN, [run for _, run in runs]))
    columns = [one.for_score(summary.judged_by) for one in (*_RUN, *others)]
    table = _table("method", *(one.head for one in columns))
    for name, run in runs:
        table.add_row(name, *(one.of(run) for one in columns), style="bold" if run is summary else "")
    lines = [f"personal models: {summary.who_took_part}"] if summary.who_took_part else []
    if summary.ended is not UNSET:
        lines.append(f"training is over: {summary.ended}")
    if summary.privacy is not UNSET:
        lines.append(summary.privacy.words)
    if lines:
        table.caption = readable.printable("; ".join(lines))
    table.columns[len(_RUN)].no_wrap = False  # "1 min 10 s" should wrap before a name does
    table.columns[0].no_wrap = max(len(name) for name, _ in runs) <= _SHORT
    return table


def device_table(
    summary: Summary,
    rivals: Mapping[str, Summary] | None = None,
    *,
    boards: Mapping[DeviceId, str] | None = None,
    limit: int = 40,
) -> Table:
    """Return a table with one row for each device; above `limit` devices, only those with the worst scores.

    Names that are too long for the terminal wrap. The score of the deployed model is shown if another column
    does not show it already; with [adoption] it replaces the scores of one more round.

    Args:
        summary: summary of the run.
        rivals: summaries by method; with them, the table shows each device's gain over local-only.
        boards: boards of the devices.
        limit: largest number of rows.
    """
    rivals, boards = rivals or {}, boards or {}
    score, rival = summary.judged_by, baseline(rivals)
    theirs = personal(rivals[rival]) if rival else {}
    gained = gains(summary, rivals[rival]) if rival else {}
    deploys_others = any(
        row.deployed not in (None, row.personal, row.after if summary.adoption is UNSET else None)
        for row in summary.by_device.values()
    )
    own, one_more, deployed = (one.for_score(score) for one in (_PERSONAL, _ONE_MORE, _DEPLOYED))
    alone = [own, *[one_more] * (summary.adoption is UNSET), *[deployed] * deploys_others]
    heads = [_in_two(rival), _in_two(summary.method), "gain"] if rival else [one.head for one in alone]
    last = [*_SENT, *map(narrow, other_metrics("device table", _OF_DEVICES, summary.by_device.values()))]
    grouped = any(row.group is not UNSET for row in summary.by_device.values())
    first = ["device", *["group"] * grouped, "board"]
    table = _table(*first, "p", _SAMPLES.head, *heads, *(one.head for one in last), left=len(first))
    shown = _worst_first(summary)[:limit] if len(summary.by_device) > limit else summary.by_device
    for device in shown:
        row = summary.by_device[device]
        against_rival = [
            unit_of(score).text(theirs.get(device)),
            own.of(row),
            _coloured(gained.get(device), unit_of(score)),
        ]
        table.add_row(
            readable.printable(device),
            *[readable.printable(row.group or readable.UNKNOWN)] * grouped,
            readable.short_board(boards.get(device, readable.UNKNOWN)),
            readable.ratio(ratio_of(summary, device)),
            _SAMPLES.of(row),
            *(against_rival if rival else [one.of(row) for one in alone]),
            *(one.of(row) for one in last),
        )
    if len(summary.by_device) > limit:
        table.caption = f"the {limit} of {len(summary.by_device)} devices that do worst; report.html has all"
    return table


def diagnostic_cells(history: DiagnosticHistory) -> list[str]:
    """Return a diagnostic's title, first value, last value, and range; with parts, each as a range over
    parts.
    """
    text = unit_of_diagnostic(history.unit).text
    ends = [text(history.mean[0]), text(history.mean[-1])]
    if history.parts:
        ends = [_over_parts(history, 0), _over_parts(history, -1)]
    title = f"{history.title} by {history.by}" if history.parts else history.title
    return [title, *ends, between(min(history.least), max(history.greatest), history.unit)]


def _over_parts(history: DiagnosticHistory, at: int) -> str:
    values = [one for values in history.parts.values() if (one := values[at]) is not None]
    return between(min(values), max(values), history.unit)


def invitation_table(invitations: Iterable[InvitationStatus]) -> Table:
    """Return a table with one row for each invitation of a fleet."""
    short = "id", "state", "ends", "joined"
    table = _plain_table((*short, "tags", "devices"), *short)
    for one in invitations:
        ends = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.expires_at))
        names = ", ".join(one.joined[:_SHOWN]) + (", ..." if len(one.joined) > _SHOWN else "")
        cells = one.id, one.state, ends, f"{one.used} of {one.devices}", ", ".join(one.tags), names
        table.add_row(*(Text(readable.printable(cell)) for cell in cells))
    return table


def registry_table(devices: Iterable[DeviceStatus], now: float, width: int) -> Table:
    """Return a table with one row for each device: who it is, and since when it is away.

    Args:
        devices: the devices of a fleet.
        now: seconds since 1970.
        width: columns of the terminal; a narrow one does not show how devices are known.
    """
    wide = width >= _ROOM_FOR_KNOWN_BY
    short = ("state", "last seen", "valid until", *["known by"] * wide, "agent")
    table = _plain_table(("device", *short, "tags"), *short)
    longest = 0
    devices = list(devices)
    old = [str(one.identity) for one in devices if one.old_authority]
    if old:
        names = ", ".join(old[:_SHOWN]) + (", ..." if len(old) > _SHOWN else "")
        line = f"still need the authority that is being replaced: {len(old)} ({names})"
        table.caption = Text(readable.printable(line))
    for one in devices:
        who = _in_short_lines(one.identity)
        longest = max(longest, *map(len, who.splitlines()))

        seen = "now" if one.connected else readable.ago(one.last_seen, now)
        cells = [
            "rejoin" if one.state == "ended" else one.state or readable.UNKNOWN,
            seen,
            readable.day(one.certificate_ends_at),
            *[one.known_by] * wide,
            one.agent.removeprefix("fleetune ") or readable.UNKNOWN,
            ", ".join(one.tags),
        ]
        table.add_row(Text(who), *(Text(readable.printable(cell)) for cell in cells))
    table.columns[0].no_wrap = longest <= _LONG_ID
    return table


def _in_short_lines(identity: Identity) -> str:
    """Return a device's name and id in one line, or in two if they are long."""
    shown = readable.printable(str(identity))
    if len(shown) <= _LONG_ID or identity.name == identity.id:
        return shown
    return f"{readable.printable(identity.name)}\n({identity.id})"


def fleet_table(devices: Iterable[DeviceStatus]) -> Table:
    """Return a table with one row for each device: what the device reported, and its part in the run."""
    right = ("p", "samples", "a round\ntakes")
    table = _plain_table(("device", "board", *right, "part in the run, why this p, conditions"), *right)
    for head in right:
        table.columns[2 + right.index(head)].justify = "right"
    for one in devices:
        cells = [
            str(one.identity),
            readable.short_board(one.board) or readable.UNKNOWN,
            readable.ratio(one.ratio),
            readable.UNKNOWN if one.num_samples is None else str(one.num_samples),
            readable.duration(one.predicted_round_s),
        ]
        conditions = readable.UNKNOWN if one.conditions is None else readable.conditions(one.conditions)
        more = (_part_in_run(one), one.ratio_reason, conditions)
        about = "\n".join(readable.printable(line) for line in more if line not in ("", readable.UNKNOWN))
        table.add_row(*(Text(readable.printable(cell)) for cell in cells), Text(about))
    return table


def _plain_table(heads: Sequence[str], *one_line: str) -> Table:
    """Return an empty table that fits a terminal; columns in `one_line` are never wrapped."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for head in heads:
        table.add_column(head, overflow="fold", no_wrap=head in one_line)
    return table


def _part_in_run(one: DeviceStatus) -> str:
    if one.refusal is not None:
        return f"takes no part: {one.refusal}"
    declined = f"declined round {one.declined_round}: {one.declined_reason}"
    if one.part == "declined":
        return declined
    part = "left" if one.left else one.part if one.ready else "away"
    return f"{part}; {declined}" if one.declined_round else part


def prediction_rows(summary: Summary) -> list[list[str]]:
    """Return a row for each predicted quantity: title, replies, median error and worst decile.

    Both errors are given over all rounds and after each device's first 5 rounds.
    """
    titles = {one.name: one.title for one in registry.METRICS}
    rows = []
    for name, found in (summary.predicted_vs_actual or {}).items():
        known = found or PredictionErrors()
        overall, learned = known.overall or Errors(), known.after_five_rounds or Errors()
        values = overall.median, overall.worst_decile, learned.median, learned.worst_decile
        rows.append([titles.get(name, name), f"{overall.pairs:,}", *map(readable.error, values)])
    return rows


def refused(summary: Summary) -> list[tuple[str, int, str]]:
    """Return (kind, count, explanation) of refused messages, most frequent first.

    The engine also counts dropped replies; a kind that the ledger counts too is listed once.
    """
    counts = {kind: count for kind, count in summary.refused.items() if count}
    named = {"abandoned" if kind.startswith("abandoned-") else kind for kind in counts}
    rows = [
        (kind.removeprefix("engine-"), count, _meaning(kind.removeprefix("engine-")))
        for kind, count in counts.items()
        if not (kind.startswith("engine-") and kind.removeprefix("engine-") in named)
    ]
    return sorted(rows, key=lambda row: (-row[1], row[0]))


def _meaning(kind: str) -> str:
    error = getattr(errors, kind, None)
    return _REFUSED.get(kind) or (error.__doc__ if isinstance(error, type) else None) or ""


def ratio_of(summary: Summary, device: DeviceId) -> float | None:
    """Return the latest ratio of a device; None if it has none."""
    if used := summary.ratios.get(device):
        return used[-1]
    row = summary.by_device.get(device)
    return row.ratio if row else None


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
    """Return a method's name in two lines, as the head of a narrow column."""
    return "\n".join(wrap(readable.clip(name, 2 * _NARROW - 2), _NARROW))


def _worst_first(summary: Summary) -> Sequence[DeviceId]:
    rows, sign = summary.by_device, better_by(summary.judged_by)
    return sorted(
        rows, key=lambda device: (rows[device].personal is None, sign * (rows[device].personal or 0.0))
    )


def _coloured(gain: float | None, unit: Unit) -> Text:
    style = "" if not gain else "green" if gain > 0 else "red"
    return Text(unit.gain(gain), style)
