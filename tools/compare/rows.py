"""Returns rounds, devices and days of a run as rows, and rows as a pandas data frame or as CSV.

Columns are metrics, under the names that `Metric.column` gives them.
"""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from fleetune.coordinator.metrics.metric import Metric
from fleetune.coordinator.metrics.personal_scores import with_personal
from fleetune.coordinator.metrics.registry import (
    AFTER,
    BEFORE,
    BYTES_DOWN,
    BYTES_UP,
    DEPLOYED,
    DOWNLOAD,
    DURATION,
    ENERGY,
    METRICS,
    PERSONAL,
    PREDICTED,
    SAMPLES,
    TRAINING,
    UPDATES,
    UPLOAD,
    metrics_of_rounds,
    round_row,
)
from fleetune.coordinator.metrics.summary import DeviceSummary, Summary
from fleetune.protocols.errors import FleetuneError
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.tasks.scores import Score
from fleetune.tools.compare.finished_run import FinishedRun
from fleetune.tools.simulator.device_specs import device_specs

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, Any]
OF_DEVICES = tuple(metric for metric in METRICS if metric.device)
ALWAYS = frozenset(
    metric.name
    for metric in (
        *(BEFORE, AFTER, PERSONAL, BYTES_DOWN, BYTES_UP, DURATION),
        *(DOWNLOAD, TRAINING, UPLOAD, ENERGY, PREDICTED, SAMPLES, UPDATES),
    )
)  # metrics that have a column even if no device reports them


def columns_of_rounds(score: Score) -> list[str]:
    """Return the columns that `round_rows` always has."""
    plain = ("round", "opened_s", "closed_s", "participants", "replies")
    known = [metric for metric in metrics_of_rounds() if metric.name in ALWAYS - {PERSONAL.name}]
    return [*plain, *(metric.column(score) for metric in known), *_so_far(score)]


def columns_of_devices(score: Score) -> list[str]:
    """Return the columns that `device_rows` always has."""
    known = (metric for metric in OF_DEVICES if metric.name in ALWAYS)
    return ["device", "ratio", "reason", *(metric.column(score) for metric in known)]


def round_rows(run: FinishedRun) -> list[Row]:
    """Return a row for each training round, ascending, with the columns that have a value.

    A row has the figures of the round's participants and the state of the fleet when the round closed.
    `..._of_fleet` is a mean over all devices that have taken part, each with its latest reply.
    `devices_so_far` is their number, and `..._so_far` are sums since the run began.
    """
    score = run.summary.judged_by
    names = _so_far(score)
    rows = []
    for record, point in zip(run.records, run.history, strict=True):
        so_far = (point.before, point.after, point.known, point.up, point.down)
        joules = {} if point.joules is None else {f"{ENERGY.name}_so_far": point.joules}
        rows.append({**round_row(record, score), **dict(zip(names, so_far, strict=True)), **joules})
    return _known(rows, metrics_of_rounds(), score, but={PERSONAL.name})


def device_rows(run: FinishedRun, settings: RunSettings | None) -> list[Row]:
    """Return a row for each device, with the columns that have a value.

    The columns include all scores of the task, `NAME_personal`, and the means of the method's diagnostics,
    `method.NAME`. `settings`: settings of a simulation, for boards and links; None for a real fleet.
    """
    score = run.summary.judged_by
    whole = with_personal(run.summary, run.records)
    fleet = _fleet(settings) if settings and run.summary.simulated else {}
    rows = [
        {
            "device": name,
            **fleet.get(name, {}),
            **({} if row.group is UNSET else {"group": row.group}),
            "ratio": row.ratio,
            "reason": row.reason,
            **{metric.column(score): metric.of_device(row) for metric in OF_DEVICES},
            **_scores(row),
            **({} if row.metrics is UNSET else row.metrics),
        }
        for name, row in whole.by_device.items()
    ]
    return _known(rows, OF_DEVICES, score)


def day_rows(summary: Summary) -> list[Row]:
    """Return a row for each day of a simulation in which devices' data grow.

    The score is that of the deployed models on the samples of that day. Rounds, joules and bytes are sums up
    to the day's end.
    """
    deployed = DEPLOYED.column(summary.judged_by)
    return [
        {
            "day": day.day,
            deployed: day.score,
            "rounds": day.rounds,
            "joules": day.joules,
            BYTES_UP.name: day.up,
            BYTES_DOWN.name: day.down,
            "drifting": day.drifting,
        }
        for day in ([] if summary.days is UNSET else summary.days)
    ]


def diagnostics_rows(summary: Summary) -> Iterator[Row]:
    """Yield the method's diagnostics: one row for each diagnostic, round and part of the diagnostic."""
    for name, history in summary.diagnostics_by_name.items():
        for at, number in enumerate(history.rounds):
            row = {"round": number, "figure": name, "part": None, "mean": history.mean[at]}
            yield {**row, "least": history.least[at], "greatest": history.greatest[at]}
            for part, means in history.parts.items():
                yield {**row, "part": part, "mean": means[at], "least": None, "greatest": None}


def csv_of(rows: Sequence[Row]) -> bytes:
    """Return rows with the same columns as CSV with a header line."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(dict.fromkeys(column for row in rows for column in row)))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def frame_of(
    rows: Iterable[Mapping[str, Any]], index: str | None = None, columns: Iterable[str] = ()
) -> "pd.DataFrame":
    """Return rows as a data frame, with columns in the order of their first occurrence.

    None among numbers becomes NaN.

    Args:
        rows: numbers, texts, or None, by column.
        index: the column that becomes the index; None for no column.
        columns: the columns if there are no rows.

    Raises:
        FleetuneError: pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError:
        raise FleetuneError("data frames need pandas: pip install 'pandas>=2.1'") from None
    rows = list(rows)
    names = dict.fromkeys(column for row in rows for column in row) or dict.fromkeys(columns)
    frame = pd.DataFrame({name: _values([row.get(name) for row in rows]) for name in names})
    return frame if index is None else frame.set_index(index)


def _values(values: list[Any]) -> list[Any]:
    if any(isinstance(value, str) for value in values):
        return values
    return [float("nan") if value is None else value for value in values]


def _so_far(score: Score) -> list[str]:
    of_fleet = (f"{metric.column(score)}_of_fleet" for metric in (BEFORE, AFTER))
    return [*of_fleet, "devices_so_far", f"{BYTES_UP.name}_so_far", f"{BYTES_DOWN.name}_so_far"]


def _scores(row: DeviceSummary) -> Mapping[str, float]:
    return {} if row.scores is UNSET else {f"{name}_personal": value for name, value in row.scores.items()}


def _fleet(settings: RunSettings) -> dict[str, Row]:
    """Return a simulated fleet's boards and links by device; empty if a file for them is missing."""
    try:
        devices = device_specs(settings.fleet, settings.run.seed)
    except FleetuneError:
        return {}
    return {
        one.name: {
            "board": one.board.name,
            "uplink_bps": one.link.rate_bps(0, "up") or one.board.uplink_bps,
            "downlink_bps": one.link.rate_bps(0, "down") or one.board.downlink_bps,
        }
        for one in devices
    }


def _known(
    rows: Sequence[Row], metrics: Iterable[Metric], score: Score, but: Iterable[str] = ()
) -> list[Row]:
    """Return the rows without columns of metrics that have no value; columns in `ALWAYS` stay."""
    always = ALWAYS.difference(but)
    optional = {metric.column(score) for metric in metrics if metric.name not in always}
    empty = {column for column in optional if all(row[column] is None for row in rows)}
    return [{column: value for column, value in row.items() if column not in empty} for row in rows]
