"""Board profiles with the speed that agents have on this machine in a calibration run.

A simulated board trains alone. Agents on one machine wait for each other, for the broker, for the relays of
their links and for other programs. So the speed is measured by the clock in real rounds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, variance

from msgspec.structs import replace

from fleetune import firmware_profiles
from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.coordinator.run.enrolment import prepare
from fleetune.coordinator.run.stored_run import method_of
from fleetune.edge_agent.budget.cost_forecast import demand
from fleetune.edge_agent.budget.owner_policy import Policy
from fleetune.firmware_profiles import UNKNOWN
from fleetune.firmware_profiles.schema import MEASURED, Figure
from fleetune.protocols.errors import SettingError
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.tools.simulator.device_specs import device_specs
from fleetune.tools.simulator.first_choices import ratio_controller_of
from fleetune.tools.simulator.partitioned_data import PartitionedData, SampleCounts
from fleetune.tools.simulator.run_devices import with_model_shape


@dataclass(frozen=True)
class Speeds:
    """Training speed of a fleet.

    Attributes:
        gflops: speed of each device by the clock; median of its rounds after the first.
        jitter: standard deviation of the logarithm between rounds; quadratic mean over devices.
    """

    gflops: dict[str, float]
    jitter: float


def speeds(settings: RunSettings, rounds: Sequence[RoundRecord]) -> Speeds:
    """Compute the speeds from a calibration run.

    Args:
        settings: settings of the calibration run.
        rounds: its rounds.

    Raises:
        SettingError: a device replied in no round after the first.
    """
    shares = PartitionedData.of_run(settings)
    enrolment = prepare(with_model_shape(settings, shares))
    method, gflops, variances = method_of(enrolment), {}, []
    for device in device_specs(settings.fleet, settings.run.seed):
        data = shares.device_data(device.index, enrolment.spec)
        controller = ratio_controller_of(device, enrolment, method, SampleCounts.of(data), Policy())
        choices = {one.ratio: one for one in controller.choices}
        seen = [
            demand(choices[reply.ratio], controller.capability, reply.local_work).samples
            / reply.actual.train_s
            for record in rounds[1:]
            if (reply := record.devices.get(device.name)) and reply.actual.train_s
        ]
        if not seen:
            raise SettingError(f"{device.name} replied in no round of the calibration run but the first")
        gflops[device.name] = median(seen) * enrolment.flops_per_sample / 1e9
        variances += [variance(map(math.log, seen))] if len(seen) > 1 else []
    return Speeds(gflops, math.sqrt(fmean(variances)) if variances else 0.0)


def board_file(folder: Path, device: str) -> Path:
    """Path of a device's board file."""
    return folder / f"{device}.toml"


def write_boards(found: Speeds, folder: Path) -> list[str]:
    """Write a board file for each device; return the `section.key=value` changes for a simulation."""
    known = firmware_profiles.load(UNKNOWN).profile
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for device, speed in found.gflops.items():
        figure = Figure(float(f"{speed:.4g}"), MEASURED, "by the clock, in a calibration run of the fleet")
        profile = replace(known, title=device, figures=replace(known.figures, training_gflops=figure))
        files.append(board_file(folder, device))
        firmware_profiles.save(files[-1], profile)
    listed = ", ".join(f'"{file.resolve()}" = 1' for file in files)
    return [f"fleet.boards={{{listed}}}", f"fleet.jitter={min(1.0, found.jitter):.3f}"]
