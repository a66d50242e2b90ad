"""Reads the board's power source and battery charge from Linux's power_supply, or else from Termux.

power_supply counts in uA, uV, uW, uWh, uAh and tenths of a degree (kernel: ABI/testing/sysfs-class-power).
Only during discharge does a battery's current equal that of the whole board.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fleetune.edge_agent.probes.files_and_commands import (
    ROOT,
    Run,
    json_object,
    matches,
    number,
    read_number,
    read_text,
    run_command,
)
from fleetune.protocols.conditions import Power

MOST_WATTS = 2000.0
_BATTERIES = ("Battery", "UPS")
_MICRO = 1e-6
_MOST = 1e12  # largest plausible value of anything counted in millionths
_CELSIUS = (-40.0, 120.0)


@dataclass(frozen=True)
class Supply:
    """The board's power supply and its batteries; None if unknown.

    Attributes:
        power: see `protocols.conditions.Conditions`.
        charge: charge of all batteries together, 0..1.
        watts: power from the batteries during discharge.
        celsius: temperature of the warmest battery.
        capacity_wh: present capacity of all full batteries, not the capacity when new.
        sensor: "power_supply" or "termux"; None if neither answered.
    """

    power: Power | None = None
    charge: float | None = None
    watts: float | None = None
    celsius: float | None = None
    capacity_wh: float | None = None
    sensor: str | None = None


def plausible_watts(watts: float) -> float | None:
    """Return `watts`, or None if no running board can draw that much."""
    return watts if 0 < watts <= MOST_WATTS else None


def read_supply(root: Path = ROOT, run: Run = run_command) -> Supply:
    """Read the kernel's figures, or Termux's if the kernel has none (Android hides them from programs)."""
    found = kernel_supply(root)
    return found if found.power is not None else termux_supply(run)


def kernel_supply(root: Path = ROOT) -> Supply:
    """Read all power supplies of the board, its batteries together; batteries of mice and the like are
    ignored.
    """
    folders = [
        folder
        for folder in matches(root, "sys/class/power_supply/*")
        if read_text(folder / "scope") != "Device"  # the battery of a peripheral such as a mouse
    ]
    kinds = {folder: read_text(folder / "type") for folder in folders}
    batteries = [
        folder for folder in folders if kinds[folder] in _BATTERIES and read_text(folder / "present") != "0"
    ]
    online = [
        read_number(folder / "online", 0, 2) for folder in folders if kinds[folder] not in (None, *_BATTERIES)
    ]
    states = [read_text(folder / "status") for folder in batteries]
    power = _power(states, online)
    return Supply(
        power=power,
        charge=_charge(batteries),
        watts=_drawn(batteries) if power == "battery" else None,
        celsius=_warmest(batteries),
        capacity_wh=_capacity_wh(batteries),
        sensor="power_supply" if power is not None else None,
    )


def _power(states: Sequence[str | None], online: Sequence[float | None]) -> Power | None:
    """Return the power source. A full battery that does not discharge is ignored."""
    if "Discharging" in states:
        return "battery"
    if "Charging" in states:
        return "charging"
    if any(online) or any(state in ("Full", "Not charging") for state in states):
        return "mains"
    return None


def _charge(batteries: list[Path]) -> float | None:
    """Return the charge by energy or charge if every battery counts it, else the mean percentage."""
    for kind in ("energy", "charge"):
        now = [read_number(folder / f"{kind}_now", 0, _MOST) for folder in batteries]
        full = [read_number(folder / f"{kind}_full", 1, _MOST) for folder in batteries]
        if batteries and None not in now and None not in full:
            return min(1.0, sum(filter(None, now)) / sum(filter(None, full)))
    levels = [read_number(folder / "capacity", 0, 100) for folder in batteries]
    known = [level for level in levels if level is not None]
    return sum(known) / len(known) / 100 if known else None


def _capacity_wh(batteries: list[Path]) -> float | None:
    """Return the capacity of the full batteries, by energy, or by charge at the present voltage."""
    full = []
    for folder in batteries:
        energy = read_number(folder / "energy_full", 1, _MOST)
        charge, volts = (read_number(folder / name, 1, _MOST) for name in ("charge_full", "voltage_now"))
        by_charge = None if charge is None or volts is None else charge * volts * _MICRO
        full.append(by_charge if energy is None else energy)
    known = [one for one in full if one is not None]
    return sum(known) * _MICRO if known and len(known) == len(full) else None


def _drawn(batteries: list[Path]) -> float | None:
    """Return the total watts of all discharging batteries; None if one of them does not report it."""
    each = [_watts(folder) for folder in batteries if read_text(folder / "status") == "Discharging"]
    known = [watts for watts in each if watts is not None]
    return sum(known) if known and len(known) == len(each) else None


def _watts(battery: Path) -> float | None:
    """Return watts from one battery. Drivers disagree about the sign of a discharge."""
    power = read_number(battery / "power_now", -_MOST, _MOST)
    if power is None:
        amperes = read_number(battery / "current_now", -_MOST, _MOST)
        volts = read_number(battery / "voltage_now", 0, _MOST)
        power = None if amperes is None or volts is None else amperes * volts * _MICRO
    return None if power is None else plausible_watts(abs(power) * _MICRO)


def _warmest(batteries: list[Path]) -> float | None:
    tenths = [read_number(folder / "temp", 10 * _CELSIUS[0], 10 * _CELSIUS[1]) for folder in batteries]
    return max((tenth / 10 for tenth in tenths if tenth is not None), default=None)


def termux_supply(run: Run = run_command) -> Supply:
    """Read `termux-battery-status`.

    Some phones report mA as uA, and the sign of the current varies.
    """
    output = json_object(run(["termux-battery-status"]))
    status, plugged = str(output.get("status")), str(output.get("plugged"))
    online = [1.0] if plugged.startswith("PLUGGED_") else []
    power = _power([status.replace("_", " ").capitalize()], online)
    percentage = number(output.get("percentage"), 0, 100)
    microamperes = number(output.get("current"), -_MOST, _MOST)
    millivolts = number(output.get("voltage"), 2000, 20_000)
    drawn = None
    if power == "battery" and microamperes is not None and millivolts is not None:
        drawn = plausible_watts(abs(microamperes) * _MICRO * millivolts / 1000)
    return Supply(
        power=power,
        charge=None if percentage is None else percentage / 100,
        watts=drawn if drawn is not None and drawn >= 0.05 else None,  # a smaller current is in mA
        celsius=number(output.get("temperature"), *_CELSIUS),
        sensor="termux" if power is not None else None,
    )
