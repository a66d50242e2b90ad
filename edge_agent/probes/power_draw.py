"""Reads the power draw of the whole board by its own sensors: INA3221 or INA238 (Jetson), the PMIC (Pi 5).

The rails (supply lines) that add up to the board differ by model. Sources: Jetson Developer Guide, "Power
Monitor", and github.com/energymon/energymon, jetson/JetsonPowerRails.md.
- VDD_IN, POM_5V_IN or 5V_IN is the module's input.
- On TX1 and TX2, VDD_MUX also covers the carrier board.
- AGX models have no input rail. AGX Orin's VDDQ_VDD2_1V8AO is part of its VIN_SYS_5V0.

For other sets of rails, no power is reported.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fleetune.edge_agent.probes.files_and_commands import (
    ROOT,
    Run,
    matches,
    number,
    read_number,
    read_text,
    run_command,
)
from fleetune.edge_agent.probes.power_supply import MOST_WATTS, kernel_supply, plausible_watts, termux_supply

_WHOLE = (
    ("VDD_IN", "VDD_MUX"),
    ("VDD_IN",),
    ("POM_5V_IN",),
    ("5V_IN",),
    ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"),
    ("GPU", "CPU", "SOC", "CV", "VDDRQ", "SYS5V"),
)
_PMIC_LINE = re.compile(r"^\s*(\S+)_([AV])\s+(?:current|volt)\(\d+\)=(\S+)[AV]\s*$", re.MULTILINE)
# The 12 rails leave out the 5 V consumers and lose some power in conversion. Compared with a USB-C meter,
# without USB devices: github.com/jfikar/RPi5-power.
_PMIC_SLOPE, _PMIC_OFFSET_W = 1.1451, 0.5879


@dataclass(frozen=True)
class Draw:
    """Power draw of the whole board, and the sensor that measured it (named as in `firmware_profiles`)."""

    watts: float
    sensor: str


@dataclass(frozen=True)
class Sensor:
    """A sensor of the whole board's power draw.

    Attributes:
        name: as in `firmware_profiles`.
        read: returns watts; None if the sensor is absent or does not answer.
        by_command: True if `read` runs an external command.
    """

    name: str
    read: Callable[[], float | None]
    by_command: bool = False


def watt_sensors(root: Path = ROOT, run: Run = run_command) -> tuple[Sensor, ...]:
    """Return all known sensors, the best first, present or not."""
    return (
        Sensor("ina3221", lambda: ina3221_watts(root)),
        Sensor("ina238", lambda: ina238_watts(root)),
        Sensor("pmic", lambda: pmic_watts(run), by_command=True),
        Sensor("power_supply", lambda: kernel_supply(root).watts),
        Sensor("termux", lambda: termux_supply(run).watts, by_command=True),
    )


def read_draw(root: Path = ROOT, run: Run = run_command) -> Draw | None:
    """Return the reading of the first sensor that answers; None if none answers."""
    for sensor in watt_sensors(root, run):
        watts = sensor.read()
        if watts is not None:
            return Draw(watts, sensor.name)
    return None


def ina3221_watts(root: Path = ROOT) -> float | None:
    """Return the board's draw by the rails of JetPack 4 (iio, mW) or of JetPack 5 and later (hwmon, mV and
    mA).
    """
    rails = _iio_rails(root) | _hwmon_rails(root)
    for names in _WHOLE:
        if all(name in rails for name in names):
            watts = [rails[name] for name in names]
            return None if None in watts else plausible_watts(sum(filter(None, watts)))
    return None


def ina238_watts(root: Path = ROOT) -> float | None:
    """Return the draw at a Jetson Thor's input, with its carrier board."""
    for name in matches(root, "sys/class/hwmon/hwmon*/name"):
        if read_text(name) == "ina238":
            microwatts = read_number(name.with_name("power1_input"), 0, MOST_WATTS * 1e6)
            return None if microwatts is None else plausible_watts(microwatts / 1e6)
    return None


def pmic_watts(run: Run = run_command) -> float | None:
    """Return the draw of a Raspberry Pi 5, without its USB devices and 5 V pins.

    A voltage without a current is not a rail.
    """
    found = {
        (rail, unit): value
        for rail, unit, value in _PMIC_LINE.findall(run(["vcgencmd", "pmic_read_adc"]) or "")
    }
    amperes = {rail: number(value, 0, 100) for (rail, unit), value in found.items() if unit == "A"}
    products = []
    for rail, ampere in amperes.items():
        volt = number(found.get((rail, "V")), 0, 30)
        if ampere is None or volt is None:
            return None
        products.append(ampere * volt)
    return plausible_watts(sum(products) * _PMIC_SLOPE + _PMIC_OFFSET_W) if any(products) else None


def _iio_rails(root: Path) -> dict[str, float | None]:
    rails = {}
    for name in matches(root, "sys/bus/i2c/drivers/ina3221x/*/iio:device*/rail_name_[0-2]"):
        milliwatts = read_number(name.with_name(f"in_power{name.name[-1]}_input"), 0, MOST_WATTS * 1000)
        rails[read_text(name) or ""] = None if milliwatts is None else milliwatts / 1000
    return rails


def _hwmon_rails(root: Path) -> dict[str, float | None]:
    """Return watts by rail. Channels 1 to 3 are rails, 4 to 7 are shunt voltages and their sum."""
    rails = {}
    for label in matches(root, "sys/bus/i2c/drivers/ina3221/*/hwmon/hwmon*/in[1-3]_label"):
        channel = label.name[2]
        millivolts = read_number(label.with_name(f"in{channel}_input"), 0, 100_000)
        milliamperes = read_number(label.with_name(f"curr{channel}_input"), 0, 100_000)
        known = millivolts is not None and milliamperes is not None
        rails[read_text(label) or ""] = (millivolts or 0) * (milliamperes or 0) / 1e6 if known else None
    return rails
