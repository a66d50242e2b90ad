"""Measures all known figures of this board; each has its source, or the reason why it is unknown."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from fleetune.edge_agent.probes import board_identity, memory, temperature
from fleetune.edge_agent.probes.conditions import read_conditions
from fleetune.edge_agent.probes.energy import EnergyMeter, rapl_counters
from fleetune.edge_agent.probes.files_and_commands import ROOT, Run, matches, run_command
from fleetune.edge_agent.probes.link_speed import LinkSpeed
from fleetune.edge_agent.probes.power_draw import watt_sensors
from fleetune.edge_agent.probes.power_supply import read_supply
from fleetune.edge_agent.probes.training_speed import TrainingSpeed, measure_training
from fleetune.edge_agent.probes.workload import Workload
from fleetune.protocols.errors import ModelError

RATIOS = (0.2, 0.6, 1.0)
PROCESSOR_ALONE = "rapl, the processor only"
_IDLE_S = 3.0


@dataclass(frozen=True)
class Figure:
    """A figure of a board, known or unknown.

    Attributes:
        value: the value; None if unknown.
        unit: unit of a number: B, s, W, degC, bit/s, 1/s; "" for none.
        note: source of the value, or the reason why it is unknown.
    """

    value: float | str | bool | None
    unit: str = ""
    note: str = ""


@dataclass(frozen=True)
class BoardMeasurement:
    """A measured board.

    Attributes:
        board: the matching firmware profile.
        sensors: sensors that can be read here, named as in `firmware_profiles`.
        figures: figures by name.
        training: training speed at each ratio; empty if not measured.
        trained: the model that was trained, or the reason why no model was trained.
        flops_per_sample: floating-point operations of a training step per sample.
    """

    board: str
    sensors: tuple[str, ...]
    figures: dict[str, Figure]
    training: tuple[TrainingSpeed, ...] = ()
    trained: str = ""
    flops_per_sample: float | None = None


@dataclass(frozen=True)
class _Place:
    """Where to read a figure, and how to explain its absence.

    Attributes:
        absent: what is missing if the figure cannot be found.
        files: files below the root. The reason names one of them that cannot be read or lacks the figure.
        unit: unit of the figure.
    """

    absent: str
    files: tuple[str, ...] = ()
    unit: str = ""


_RAILS = ("sys/bus/i2c/drivers/ina3221*/*-*", "sys/class/hwmon/hwmon*/power1_input")
_SUPPLIES = "/sys/class/power_supply"
_PLACES = {
    "model": _Place("no device tree, and no name from the firmware", ("proc/device-tree/model",)),
    "processor": _Place("/proc/cpuinfo names none", ("proc/cpuinfo",)),
    "cores": _Place("/sys/devices/system/cpu lists none"),
    "fitted_bytes": _Place("no /proc/meminfo", ("proc/meminfo",), "B"),
    "taken_bytes": _Place("no /proc/self/status", ("proc/self/status",), "B"),
    "memory_bytes": _Place("no /proc/meminfo", ("proc/meminfo",), "B"),
    "power": _Place(
        f"no power supply in use at {_SUPPLIES}, and no Termux:API",
        ("sys/class/power_supply/*/type",),
    ),
    "battery": _Place(
        f"no battery at {_SUPPLIES}, and no Termux:API", ("sys/class/power_supply/*/capacity",)
    ),
    "battery_wh": _Place(
        f"no battery with a charge level at {_SUPPLIES}", ("sys/class/power_supply/*/*_full",), "Wh"
    ),
    "watts": _Place("no INA3221, INA238 or PMIC, and no battery in discharge", _RAILS, "W"),
    "idle_w": _Place(
        "no INA3221, INA238, PMIC or RAPL, and no battery in discharge",
        (*_RAILS, "sys/class/powercap/intel-rapl:*/energy_uj"),
        "W",
    ),
    "celsius": _Place(
        "no zone at /sys/class/thermal, and no battery with a temperature",
        ("sys/class/thermal/thermal_zone*/temp",),
        "degC",
    ),
    "throttled": _Place(
        "no vcgencmd, and no processor among the cooling devices at /sys/class/thermal",
        ("sys/class/thermal/cooling_device*/cur_state",),
    ),
    "metered": _Place("no information from NetworkManager, and no Termux:API"),
}
_PLACES["train_w"] = _PLACES["idle_w"]
_CONDITIONS = ("memory_bytes", "power", "battery", "watts", "celsius", "throttled", "metered")
_NOTES = {
    "cores": "available to this process",
    "fitted_bytes": "without the kernel's own",
    "taken_bytes": "by this program so far",
    "memory_bytes": "most that this process may take",
    "battery_wh": "when full",
    "celsius": "of the hottest zone",
}


def measure_board(
    root: Path = ROOT,
    run: Run = run_command,
    *,
    workload: Callable[[], Workload] | None = None,
    link: Callable[[], LinkSpeed] | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> BoardMeasurement:
    """Read the board's figures, and measure training and link if requested, which takes some seconds.

    Args:
        root: folder that contains `proc` and `sys`.
        run: runs external commands.
        workload: function that returns what to train, or raises ModelError; None to skip the training speed.
        link: function that measures the link; None to skip the link.
        clock: monotonic seconds.
        sleep: waits while the idle board's power is measured.
    """
    meter = EnergyMeter(root, run, clock=clock)
    figures = _board_figures(root, run) | condition_figures(root, run)
    figures["idle_w"] = _idle_watts(meter, root, sleep)
    found = BoardMeasurement(
        board_identity.board_name(root, run), _sensors(root, run), figures, trained="not asked for"
    )
    if workload is not None:
        found = _with_training(found, workload, meter, root, clock)
    return _with_link(found, LinkSpeed(unknown="give --broker and --fleet") if link is None else link())


def _with_training(
    found: BoardMeasurement,
    workload: Callable[[], Workload],
    meter: EnergyMeter,
    root: Path,
    clock: Callable[[], float],
) -> BoardMeasurement:
    try:
        work = workload()
        meter.start()
        speeds = measure_training(
            work.backend,
            work.data,
            work.settings,
            work.weights,
            RATIOS,
            memory=memory.PeakMemory(root),
            clock=clock,
        )
    except ModelError as problem:
        meter.stop()
        return replace(found, trained=str(problem))
    return replace(
        found,
        figures={**found.figures, "train_w": _mean_watts(meter, root)},
        training=speeds,
        trained=work.where_from,
        flops_per_sample=work.flops_per_sample,
    )


def _with_link(found: BoardMeasurement, link: LinkSpeed) -> BoardMeasurement:
    measured = {
        "uplink_bps": (link.uplink_bps, "bit/s"),
        "downlink_bps": (link.downlink_bps, "bit/s"),
        "round_trip_s": (link.round_trip_s, "s"),
    }
    figures = {
        name: Figure(value, unit, link.unknown if value is None else "to the broker")
        for name, (value, unit) in measured.items()
    }
    return replace(found, figures=found.figures | figures)


def _board_figures(root: Path, run: Run) -> dict[str, Figure]:
    limit = memory.cgroup_limit_bytes(root)
    values = {
        "model": board_identity.model(root, run),
        "processor": board_identity.processor(root),
        "cores": board_identity.num_cores(root),
        "fitted_bytes": memory.total_bytes(root),
        "taken_bytes": memory.process_memory(root).resident,
        "battery_wh": read_supply(root, run).capacity_wh,
    }
    figures = {name: _figure(root, name, value) for name, value in values.items()}
    limited = Figure(limit, "B", "none is set" if limit is None else "of control groups")
    return {**figures, "cgroup_limit_bytes": limited}


def condition_figures(root: Path = ROOT, run: Run = run_command) -> dict[str, Figure]:
    """Return each of `Conditions` as a figure, with the reason if it is unknown."""
    now = read_conditions(root, run)
    return {name: _figure(root, name, getattr(now, name)) for name in _CONDITIONS}


def _figure(root: Path, name: str, value: float | str | bool | None) -> Figure:
    return Figure(value, _PLACES[name].unit, _why(root, name) if value is None else _NOTES.get(name, ""))


def _idle_watts(meter: EnergyMeter, root: Path, sleep: Callable[[float], None]) -> Figure:
    """Return the power draw of the idle board. Without a sensor this does not wait."""
    meter.start()
    if meter.sensor is not None:
        sleep(_IDLE_S)
    return _mean_watts(meter, root)


def _mean_watts(meter: EnergyMeter, root: Path) -> Figure:
    """Return the mean power draw since the meter was started."""
    joules = meter.stop()
    if joules is None or meter.seconds <= 0:
        return Figure(None, "W", _why(root, "idle_w"))
    sensor = meter.sensor if meter.covers == "board" else PROCESSOR_ALONE
    return Figure(joules / meter.seconds, "W", str(sensor))


def _sensors(root: Path, run: Run) -> tuple[str, ...]:
    found = [sensor.name for sensor in watt_sensors(root, run) if sensor.read() is not None]
    others = {
        read_supply(root, run).sensor: True,
        "rapl": bool(rapl_counters(root)[0]),
        "thermal": temperature.celsius(root) is not None,
        "throttled": temperature.throttled(root, run) is not None,
    }
    found += [name for name, there in others.items() if there and name is not None]
    return tuple(dict.fromkeys(found))


def _why(root: Path, name: str) -> str:
    """Return the reason why a figure is unknown, in a few words."""
    place = _PLACES[name]
    there = [path for pattern in place.files for path in matches(root, pattern)]
    closed = [path for path in there if not os.access(path, os.R_OK)]
    if closed:
        return f"no permission to read {closed[0]}"
    return f"{place.absent}; {there[0]} does not have it" if there else place.absent
