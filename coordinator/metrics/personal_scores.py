"""Personal scores of a run's devices, read from its summary, and gains over another run."""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from fleetune.coordinator.metrics.averages import mean, weighted_mean
from fleetune.coordinator.metrics.summary import DeviceSummary, Summary, over_participants
from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.tasks.scores import Score
from fleetune.protocols.wire.payloads import Measures

LOCAL = "local-only"


def with_personal(summary: Summary, records: Sequence[RoundRecord]) -> Summary:
    """Return the summary with personal scores; missing ones are taken from each device's last reply.

    A run without a final evaluation has no personal scores. The last reply's `after` is the same quantity:
    the score of the personal model after its last training.
    """
    last = {
        device: reply.measures
        for record in records
        if not record.final_evaluation
        for device, reply in record.devices.items()
    }
    rows = {device: _filled(row, last.get(device)) for device, row in summary.by_device.items()}
    judged = summary.judged
    if judged.personal_mean is None:
        judged = replace(
            judged,
            personal_mean=mean(row.personal for row in rows.values()),
            personal_weighted=weighted_mean((row.personal, row.num_samples or 0) for row in rows.values()),
        )
        judged = over_participants(judged, rows.values())
    return replace(summary.with_judged(judged), by_device=rows)


def _filled(row: DeviceSummary, last: Measures | None) -> DeviceSummary:
    if row.personal is not None or last is None:
        return row
    return replace(row, personal=last.after, num_samples=last.num_samples)


def personal(summary: Summary) -> dict[DeviceId, float]:
    """Return the personal score of each device that has one."""
    rows = summary.by_device.items()
    return {device: row.personal for device, row in rows if row.personal is not None}


def trained(summary: Summary) -> dict[DeviceId, float]:
    """Return the personal score of each device that took part and has one."""
    rows = summary.by_device
    return {device: score for device, score in personal(summary).items() if rows[device].took_part}


def gains(summary: Summary, rival: Summary) -> dict[DeviceId, float]:
    """Return the gain in personal score over the rival, for each device that took part in both runs."""
    theirs, sign = trained(rival), better_by(summary.judged_by)
    ours = trained(summary).items()
    return {device: sign * (value - theirs[device]) for device, value in ours if device in theirs}


def better_by(score: Score) -> int:
    """Return 1 if a higher score is better, -1 if a lower score is better."""
    return 1 if score.better == "higher" else -1


def baseline(rivals: Mapping[str, Summary]) -> str | None:
    """Return the rival that gains are measured against: local-only if present, else the first; None without
    rivals.
    """
    return LOCAL if LOCAL in rivals else next(iter(rivals), None)
