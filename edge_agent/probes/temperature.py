"""Reads the board's temperature, and whether heat or low voltage slows the board down."""

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

_MOST_CELSIUS = 150.0
_LEAST_CELSIUS = -40.0
# always 50 or 100 degrees on a Jetson, github.com/balena-os/balena-jetson/issues/142
_MADE_UP_ZONES = ("PMIC-Die",)
# Low voltage, frequency capped, throttled, soft limit. Bits 16 to 19 hold the same since boot.
_PI_NOW = 0b1111
_CPU_COOLING = ("cpufreq", "thermal-cpufreq", "Processor")


def celsius(root: Path = ROOT) -> float | None:
    """Return the temperature of the hottest thermal zone, in degrees Celsius; None if no zone can be read.

    Zones within 1 degree of 0 are ignored: some Android kernels report whole degrees instead of thousandths.
    """
    found = []
    for temperature in matches(root, "sys/class/thermal/thermal_zone*/temp"):
        thousandths = read_number(temperature, 1000 * _LEAST_CELSIUS, 1000 * _MOST_CELSIUS)
        kind = read_text(temperature.with_name("type")) or ""
        if thousandths is not None and abs(thousandths) >= 1000 and not kind.startswith(_MADE_UP_ZONES):
            found.append(thousandths / 1000)
    return max(found, default=None)


def throttled(root: Path = ROOT, run: Run = run_command) -> bool | None:
    """Return True if the processor is slowed down now, by a Raspberry Pi's firmware or by the kernel's
    cooling.
    """
    readings = [_by_firmware(root, run), _by_cooling(root)]
    known = [one for one in readings if one is not None]
    return any(known) if known else None


def throttle_count(root: Path = ROOT) -> int | None:
    """Return how often x86 processors have throttled themselves since boot; the count rises while they do."""
    counts = [
        read_number(path, 0, 2.0**53)
        for path in matches(root, "sys/devices/system/cpu/cpu*/thermal_throttle/*_throttle_count")
    ]
    known = [count for count in counts if count is not None]
    return int(sum(known)) if known else None


def _by_firmware(root: Path, run: Run) -> bool | None:
    """Return the firmware's `get_throttled`: a file on most kernels, else a command's `throttled=0x50005`."""
    for path in matches(root, "sys/devices/platform/soc*/soc*firmware/get_throttled"):
        bits = _hexadecimal(read_text(path))
        if bits is not None:
            return bool(bits & _PI_NOW)
    name, _, value = (run(["vcgencmd", "get_throttled"]) or "").strip().partition("=")
    bits = _hexadecimal(value) if name == "throttled" else None
    return None if bits is None else bool(bits & _PI_NOW)


def _by_cooling(root: Path) -> bool | None:
    states = [
        read_number(kind.with_name("cur_state"), 0, 10_000)
        for kind in matches(root, "sys/class/thermal/cooling_device*/type")
        if (read_text(kind) or "").startswith(_CPU_COOLING)
    ]
    known = [state for state in states if state is not None]
    return any(known) if known else None


def _hexadecimal(text: str | None) -> int | None:
    try:
        bits = int(text or "", 16)
    except ValueError:
        return None
    return bits if number(bits, 0, 2.0**32) is not None else None
