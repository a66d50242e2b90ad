"""A run's rounds and devices as rows of plain numbers: columns are metrics, under their names."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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
from fleetune.tools.compare.played import Played
from fleetune.tools.compare.tables import diagnostic_rows
from fleetune.tools.simulator.simulated_fleet import device_specs

Row = dict[str, Any]
OF_DEVICES = tuple(metric for metric in METRICS if metric.device)
ALWAYS = frozenset(
    metric.name
    for metric in (
        *(BEFORE, AFTER, PERSONAL, BYTES_DOWN, BYTES_UP, DURATION),
        *(DOWNLOAD, TRAINING, UPLOAD, ENERGY, PREDICTED, SAMPLES, UPDATES),
    )
)  # columns that are there though nobody tells them


def columns_of_rounds(score: Score) -> list[str]:
    """What a row of `round_rows` has in any case."""
    plain = ("round", "opened_s", "closed_s", "participants", "replies")
    told = [metric for metric in metrics_of_rounds() if metric.name in ALWAYS - {PERSONAL.name}]
    return [*plain, *(metric.column(score) for metric in told), *_of_fleet(score), "devices_so_far"]


def columns_of_devices(score: Score) -> list[str]:
    """What a row of `device_rows` has in any case."""
    told = (metric for metric in OF_DEVICES if metric.name in ALWAYS)
    return ["device", "ratio", "reason", *(metric.column(score) for metric in told)]


def round_rows(run: Played) -> list[Row]:
    """All training rounds, ascending, with columns that somebody told.

    Beside what a round's participants came to stands how the fleet stood when it closed: `..._of_fleet`,
    every device that has taken part with its latest reply, and `devices_so_far`, how many these are.
    """
    score = run.summary.judged_by
    before, after = _of_fleet(score)
    rows = [
        {
            **round_row(record, score),
            before: point.before,
            after: point.after,
            "devices_so_far": point.known,
        }
        for record, point in zip(run.records, run.points, strict=True)
    ]
    return _told(rows, metrics_of_rounds(), score, but={PERSONAL.name})


def device_rows(run: Played, settings: RunSettings | None) -> list[Row]:
    """All devices, with columns that somebody told; `settings`: of a simulation, for boards and links.

    All scores of the task stand there, `NAME_personal`, and the means of the method's figures, `method.NAME`.
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
    return _told(rows, OF_DEVICES, score)


def day_rows(summary: Summary) -> list[Row]:
    """Of a simulation whose devices' data grow, a row a day: how well devices did with what they served, on
    the samples that came that day, and rounds, joules and bytes until the day's end.
    """
    served = DEPLOYED.column(summary.judged_by)
    return [
        {
            "day": day.day,
            served: day.score,
            "rounds": day.rounds,
            "joules": day.joules,
            BYTES_UP.name: day.up,
            BYTES_DOWN.name: day.down,
            "drifting": day.drifting,
        }
        for day in ([] if summary.days is UNSET else summary.days)
    ]


def diagnostics_rows(summary: Summary) -> list[Row]:
    """What the method told of its inner workings: one row a figure, a round, and a part of it."""
    order = ("figure", "part", "mean", "least", "greatest")
    return [
        {"round": row["number"], **{name: row.get(name) for name in order}}
        for row in diagnostic_rows(summary)
    ]


def _of_fleet(score: Score) -> tuple[str, str]:
    return f"{BEFORE.column(score)}_of_fleet", f"{AFTER.column(score)}_of_fleet"


def _scores(row: DeviceSummary) -> Mapping[str, float]:
    return {} if row.scores is UNSET else {f"{name}_personal": value for name, value in row.scores.items()}


def _fleet(settings: RunSettings) -> dict[str, Row]:
    """Boards and links of a simulated fleet; empty: a file that it was made of is not here any more."""
    try:
        devices = device_specs(settings)
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


def _told(rows: Sequence[Row], metrics: Iterable[Metric], score: Score, but: Iterable[str] = ()) -> list[Row]:
    """Without the columns of metrics that nobody told, but for those that are always there."""
    always = ALWAYS.difference(but)
    silent = {
        column
        for metric in metrics
        if metric.name not in always and all(row[metric.column(score)] is None for row in rows)
        for column in (metric.column(score),)
    }
    return [{column: value for column, value in row.items() if column not in silent} for row in rows]
