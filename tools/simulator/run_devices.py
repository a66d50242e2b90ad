"""Makes the devices of a run, from settings and data to simulated devices with their first ratios chosen."""

from pathlib import Path

from msgspec.structs import replace

from fleetune.coordinator.run.stored_run import method_of
from fleetune.edge_agent.budget.owner_policy import Policy
from fleetune.edge_agent.stream.retention import RetentionLimits
from fleetune.protocols.errors import SettingError
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.run_toml import convert
from fleetune.protocols.tasks import task_of
from fleetune.protocols.update.encodings import RAW
from fleetune.protocols.update.reference_model import ReferenceModel
from fleetune.protocols.wire.payloads import Enrolment
from fleetune.tools.simulator.device_specs import device_specs
from fleetune.tools.simulator.first_choices import FirstChoices
from fleetune.tools.simulator.partitioned_data import PartitionedData, SampleCounts
from fleetune.tools.simulator.simulated_device import SimulatedDevice
from fleetune.tools.simulator.streams.arrivals import ArrivalSchedule
from fleetune.tools.simulator.streams.daily_scores import DailyScores
from fleetune.tools.simulator.streams.stream_devices import stream_devices

Arrivals = tuple[ArrivalSchedule, DailyScores]


def with_model_shape(settings: RunSettings, data: PartitionedData) -> RunSettings:
    """Return the settings with the model's input shape and number of classes; missing ones come from the
    data.
    """
    x, y = data.dataset.x, data.dataset.y
    shape = x.shape[1:] if x.ndim > 3 or x.dtype != "uint8" else (1, *x.shape[1:])
    model = settings.model
    filled = replace(model, input_shape=model.input_shape or tuple(int(n) for n in shape))
    if filled.num_classes is None:
        task = task_of(settings.task)
        filled = replace(filled, num_classes=task.num_outputs(filled.input_shape or (), y))
    return replace(settings, model=filled)


def simulated_devices(
    settings: RunSettings, enrolment: Enrolment, data: PartitionedData
) -> list[SimulatedDevice]:
    """Return all devices of a run in their initial state.

    Raises:
        SettingError: see `device_specs` and `PartitionedData`.
    """
    method, policy = method_of(enrolment), convert(settings.fleet.policy, Policy, "fleet.policy")
    streams = stream_devices(settings, enrolment, data, Path(), None)
    if streams is None:
        counts = data.counts(enrolment.spec)
    else:
        counts = [SampleCounts.of(streams.first_data(index)) for index in range(settings.fleet.devices)]
    base = None if enrolment.downlink.name == RAW else ReferenceModel.whole(enrolment.weights).digest
    first_choices = FirstChoices(enrolment, method, policy)
    flops, compact = enrolment.flops_per_sample, enrolment.compact is True
    return [
        SimulatedDevice.of(spec, first_choices.of(spec, own), policy, flops, compact=compact, base=base)
        for spec, own in zip(device_specs(settings.fleet, settings.run.seed), counts, strict=True)
    ]


def arrivals_of(settings: RunSettings, data: PartitionedData) -> Arrivals | None:
    """Return the samples that arrive at the devices, and their daily scores; None if the data do not grow.

    Raises:
        SettingError: [data.arrivals] is wrong.
    """
    if settings.data.arrivals is None:
        return None
    convert(settings.data.arrivals.keep, RetentionLimits, "data.arrivals.keep")
    schedule = ArrivalSchedule(settings, data)
    schedule.check()
    return schedule, DailyScores(task_of(settings.task))


def groups_of(settings: RunSettings, data: PartitionedData) -> dict[str, str]:
    """Return the groups of the data that each device has; {} if the data are not partitioned by group."""
    if settings.data.partition.kind != "group":
        return {}
    return {spec.name: data.group(spec.index) for spec in device_specs(settings.fleet, settings.run.seed)}


def devices_before_round_one(settings: RunSettings, devices: list[SimulatedDevice]) -> int:
    """Return how many devices report before the first round: all, unless devices connect and disconnect.

    Raises:
        SettingError: no device can take part.
    """
    refusals = [device.refusal for device in devices]
    if None not in refusals:
        raise SettingError(f"no device can take part: {refusals[0]}")
    return (settings.round.start_with or 1) if settings.fleet.availability < 1 else len(devices)
