"""Opens the folder of a simulated run: a new run, or one that was stopped."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from msgspec import UNSET
from msgspec.structs import replace

from fleetune.coordinator.combine.rules import check_rule
from fleetune.coordinator.metrics.summary import Summary
from fleetune.coordinator.rounds.policies.semi_asynchronous import check_method
from fleetune.coordinator.run.enrolment import Beginning, begin
from fleetune.coordinator.run.open_or_resume import open_run
from fleetune.coordinator.run.starting_weights import run_named
from fleetune.coordinator.run.stored_run import Run, method_of, stored_run
from fleetune.coordinator.store.run_folder import DEVICES
from fleetune.edge_agent.training.local_training import single_sample_line, trains_on_single_samples
from fleetune.protocols.model.spec import ModelSpec
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.schedule import UTC
from fleetune.protocols.wire.transfer import digest_of
from fleetune.tools.simulator.caller_samples import CallerSamples
from fleetune.tools.simulator.checkpoint.existing_run import ExistingRun
from fleetune.tools.simulator.device_specs import check_counts, check_ends, device_specs
from fleetune.tools.simulator.partitioned_data import PartitionedData
from fleetune.tools.simulator.run_devices import (
    Arrivals,
    arrivals_of,
    devices_before_round_one,
    groups_of,
    simulated_devices,
    with_model_shape,
)
from fleetune.tools.simulator.simulated_device import SimulatedDevice
from fleetune.tools.simulator.starting_models import carry_over
from fleetune.tools.simulator.workers.trainer_choice import run_model, run_trainer

_NAMED = 5  # maximum number of devices that a line names


@dataclass(frozen=True)
class OpenRun:
    """An open simulated run and its devices.

    Attributes:
        run: the run with its store.
        devices: the devices in their initial state.
        sent_bytes: bytes that each device downloads before its first round.
        arrivals: arriving samples; None if the devices' data do not grow.
        notices: lines for the user.
        groups: groups of the data by device.
    """

    run: Run
    devices: list[SimulatedDevice]
    sent_bytes: int = 0
    arrivals: Arrivals | None = None
    notices: str = ""
    groups: Mapping[str, str] = field(default_factory=dict)

    def completed(self, summary: Summary) -> Summary:
        """Return the summary with each device's groups of the data, and with the scores of the days."""
        rows = summary.by_device.items()
        named = {name: replace(row, group=self.groups.get(name) or UNSET) for name, row in rows}
        summary = replace(summary, by_device=named)
        return summary if self.arrivals is None else replace(summary, days=self.arrivals[1].ended)


def open_new(
    settings: RunSettings,
    folder: Path,
    runs: Path,
    caller_samples: CallerSamples,
    workers: int,
    *,
    fresh: bool,
) -> OpenRun:
    """Open a new run. An earlier run is removed only after everything that can fail has been tried.

    Args:
        settings: settings of the run.
        folder: folder of the run.
        runs: the folder of runs from which this one may continue.
        caller_samples: samples that the caller passed.
        workers: number of processes; 0: this process does all work.
        fresh: True replaces an earlier run in the folder.

    Raises:
        FleetuneError: settings, data or model are wrong.
    """
    check_counts(settings.round, settings.fleet.devices)
    check_ends(settings)
    data = PartitionedData.of_run(settings, caller_samples)
    settings = with_model_shape(settings, data)
    beginning = begin(settings, runs, partial(run_model, workers=workers))
    enrolment = beginning.enrolment
    check_method(settings, method_of(enrolment))
    check_rule(settings, method_of(enrolment))
    arrivals = arrivals_of(settings, data)
    devices = simulated_devices(settings, enrolment, data)
    start_with = devices_before_round_one(settings, devices)
    settings = replace(settings, round=replace(settings.round, start_with=start_with))
    zone = settings.schedule.zone or UTC  # the digest is the same on every machine
    settings = replace(settings, schedule=replace(settings.schedule, zone=zone))
    trains = run_trainer(settings, enrolment, workers=workers)
    run = open_run(
        settings,
        folder,
        fresh=fresh,
        durable=False,
        in_process=True,
        beginning=dataclasses.replace(beginning, bundle=trains.bundle),
    )
    try:
        names = [device.name for device in devices]
        begins = carry_over(settings, run.enrolment, names, folder / DEVICES, runs)
        single = _single_sample_notice(settings, enrolment.spec, data)
        notices = "; ".join(filter(None, (begins, trains.notice, single)))
        sent_bytes = _sent_at_first(run, beginning, runs)
        return OpenRun(run, devices, sent_bytes, arrivals, notices, groups_of(settings, data))
    except BaseException:
        run.store.close()
        raise


def open_stopped(found: ExistingRun, folder: Path, caller_samples: CallerSamples) -> OpenRun:
    """Open a run that was stopped."""
    data = PartitionedData.of_run(found.settings, caller_samples)
    devices = simulated_devices(found.settings, found.enrolment, data)
    run = open_run(found.settings, folder, durable=False, in_process=True)
    run.controller.recall()
    arrivals, groups = arrivals_of(found.settings, data), groups_of(found.settings, data)
    return OpenRun(run, devices, arrivals=arrivals, groups=groups)


def _single_sample_notice(settings: RunSettings, spec: ModelSpec, data: PartitionedData) -> str:
    """Return a line about devices with batches of one sample; empty if there are none."""
    if settings.data.arrivals is not None:
        return ""
    batch_size = settings.training.batch_size
    counts = zip(device_specs(settings.fleet, settings.run.seed), data.counts(spec), strict=True)
    names = [device.name for device, own in counts if trains_on_single_samples(spec, own.train, batch_size)]
    if not names:
        return ""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    verb = "has" if len(names) == 1 else "have"
    return single_sample_line(f"{', '.join(names[:_NAMED])}{more} {verb} 1 training sample", batch_size)


def _sent_at_first(run: Run, beginning: Beginning, runs: Path) -> int:
    """Return the bytes that each device downloads before its first round.

    A backbone that the device already has does not count.
    """
    before = run_named(run.settings)
    if beginning.backbone is None:
        return len(run.payload)
    if before is not None:
        with stored_run(runs / before) as stored:
            known = stored.enrolment.spec.backbone
        if known is not UNSET and known.digest == digest_of(beginning.backbone):
            return len(run.payload)
    return len(run.payload) + len(beginning.backbone)
