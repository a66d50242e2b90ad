"""summary.json: what a run came to, for scripts, tables and plots."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from msgspec import UNSET

from fleetune.coordinator.reports.predictions import both, predicted_vs_actual
from fleetune.coordinator.rounds.records import DeviceRound, Ledger, RoundRecord
from fleetune.coordinator.run.stored_run import Run
from fleetune.protocols.model.spec import ModelSpec
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.skeletons.method import DeviceId, DeviceReport
from fleetune.protocols.wire.payloads import Measures


def summary_of(run: Run, *, simulated: bool) -> dict[str, Any]:
    """The content of summary.json of an open run, see `summarise`."""
    controller = run.controller
    state, records, ledger = controller.engine.state, controller.records(), controller.ledger
    reports = {device: member.report for device, member in state.members.items() if member.report}
    return summarise(
        run.settings,
        run.enrolment.spec,
        records,
        ledger,
        state.counters,
        reports=reports,
        simulated=simulated,
    )


def summarise(
    settings: RunSettings,
    spec: ModelSpec,
    records: Sequence[RoundRecord],
    ledger: Ledger,
    counters: dict[str, int],
    *,
    reports: Mapping[DeviceId, DeviceReport] | None = None,
    simulated: bool,
) -> dict[str, Any]:
    """The content of summary.json. Keys that do not apply are None.

    Accuracies are fractions on the devices' own test splits. `personal_*`: each device's personal model
    as it stood after the last round; `before_*` and `after_*`: one more round's work on a copy of it,
    the model local training starts from and the personal model it leads to (the final evaluation). `kept_*`:
    the model that the device would serve, of all that the run led it to (docs/personal-models.md). Without a
    final evaluation they are None. `best_round` is the round whose participants' personal models did best.
    Bytes are payload bytes as counted where they were sent and received; `*_dense` are the bytes of as many
    whole models in float32. `seconds` of a simulation are simulated. `joules` are of the training rounds'
    replies that tell them. `predicted_vs_actual`: see there; of a device `reason` is why it took its latest
    ratio, `predicted_s` and `actual_s` are medians over its training rounds.
    """
    training = [record for record in records if not record.final_evaluation]
    final_evaluation = next((record for record in records if record.final_evaluation), None)
    traffic = ledger.traffic.values()
    tasks, updates = sum(one.tasks for one in traffic), sum(one.updates for one in traffic)
    return {
        "method": settings.method["name"],
        "model": spec.name,
        "parameters": spec.num_parameters,
        "rounds": len(training),
        "devices": len(ledger.traffic),
        "seed": settings.run.seed,
        "simulated": simulated,
        "accuracy": _accuracy(training, final_evaluation),
        "bytes": {
            "up": sum(one.up for one in traffic),
            "down": sum(one.down for one in traffic),
            "up_dense": 4 * spec.num_parameters * updates,
            "down_dense": 4 * spec.num_parameters * tasks,
            "enrolment": sum(one.enrolment for one in traffic),
            "rehearsal_up": sum(one.final_evaluation_up for one in traffic),
            "rehearsal_down": sum(one.final_evaluation_down for one in traffic),
        },
        "seconds": _seconds(training, ledger),
        "ratios": _by_device(training, lambda reply: reply.ratio),
        "joules": total(reply.actual.joules for reply in _replies(training)),
        "predicted_vs_actual": predicted_vs_actual(training),
        "refused": {**ledger.refusals, **{f"engine-{name}": n for name, n in sorted(counters.items())}},
        "turned_away": {
            device: dict(sorted(kinds.items())) for device, kinds in sorted(ledger.turned_away.items())
        },
        "by_device": _devices(training, final_evaluation, ledger, reports or {}),
    }


def mean(values: Iterable[float | None]) -> float | None:
    """Of those that are there; None when none is."""
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None


def total(values: Iterable[float | None]) -> float | None:
    """Of those that are there; None when none is."""
    there = [value for value in values if value is not None]
    return sum(there) if there else None


def weighted_mean(pairs: Iterable[tuple[float | None, int]]) -> float | None:
    """Of (value, weight) pairs whose value is there; None when there is none."""
    there = [(value, weight) for value, weight in pairs if value is not None]
    total = sum(weight for _, weight in there)
    return sum(value * weight for value, weight in there) / total if total else None


def _accuracy(training: Sequence[RoundRecord], final_evaluation: RoundRecord | None) -> dict[str, Any]:
    final: list[Measures] = (
        [reply.measures for reply in final_evaluation.devices.values()] if final_evaluation else []
    )
    rounds = [(mean(r.measures.after for r in record.devices.values()), record) for record in training]
    scored = [(value, record.number) for value, record in rounds if value is not None]
    best = max(scored, default=None, key=lambda pair: (pair[0], -pair[1]))
    return {
        "personal_mean": mean(m.personal for m in final),
        "personal_weighted": weighted_mean((m.personal, m.num_samples) for m in final),
        "before_mean": mean(m.before for m in final),
        "before_weighted": weighted_mean((m.before, m.num_samples) for m in final),
        "after_mean": mean(m.after for m in final),
        "after_weighted": weighted_mean((m.after, m.num_samples) for m in final),
        "kept_mean": mean(_kept(m) for m in final),
        "kept_weighted": weighted_mean((_kept(m), m.num_samples) for m in final),
        "local_only": None,
        "fedavg": None,
        "best_round": {"round": best[1], "after_mean": best[0]} if best else None,
    }


def _kept(measures: Measures) -> float | None:
    return None if measures.kept is UNSET else measures.kept


def _seconds(training: Sequence[RoundRecord], ledger: Ledger) -> dict[str, float | None]:
    replies = [reply.actual for reply in _replies(training)]
    ended = ledger.ended_at is not None and ledger.began_at is not None
    return {
        "wall": ledger.ended_at - ledger.began_at if ended else None,  # type: ignore[operator]
        "rounds": training[-1].closed_s if training else None,
        "train": total(actual.train_s for actual in replies),
        "up": total(actual.upload_s for actual in replies),
        "down": total(actual.download_s for actual in replies),
    }


def _by_device(training: Sequence[RoundRecord], pick: Callable[[DeviceRound], Any]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for record in training:
        for device, reply in record.devices.items():
            found.setdefault(device, []).append(pick(reply))
    return dict(sorted(found.items()))


def _replies(training: Sequence[RoundRecord]) -> list[DeviceRound]:
    return [reply for record in training for reply in record.devices.values()]


def _devices(
    training: Sequence[RoundRecord],
    final_evaluation: RoundRecord | None,
    ledger: Ledger,
    reports: Mapping[DeviceId, DeviceReport],
) -> dict[str, dict[str, Any]]:
    closing = final_evaluation.devices if final_evaluation else {}
    rounds = _by_device(training, lambda reply: reply)
    rows = {}
    for device, traffic in sorted(ledger.traffic.items()):
        reply, report, replies = closing.get(device), reports.get(device), rounds.get(device, [])
        seconds = [both(one, "seconds") for one in replies]
        rows[device] = {
            "ratio": reply.ratio if reply else None,
            "num_samples": reply.measures.num_samples if reply else None,
            "personal": reply.measures.personal if reply else None,
            "before": reply.measures.before if reply else None,
            "after": reply.measures.after if reply else None,
            "kept": _kept(reply.measures) if reply else None,
            "up": traffic.up,
            "down": traffic.down,
            "updates": traffic.updates,
            "reason": report.reason if report else None,
            "predicted_s": _median(predicted for predicted, _ in seconds),
            "actual_s": _median(actual for _, actual in seconds),
            "joules": total(one.actual.joules for one in replies),
        }
    return rows


def _median(values: Iterable[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return median(there) if there else None
