"""Writes a firmware profile of this board; figures that were not measured come from the matching profile."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from fleetune import firmware_profiles
from fleetune.edge_agent.probes.board_measurement import PROCESSOR_ALONE, BoardMeasurement
from fleetune.firmware_profiles.schema import ESTIMATE, MEASURED, Figure, Profile, ProfileError
from fleetune.protocols.errors import SettingError

_KEYS = {
    "cores": ("cores", 1),
    "memory_mib": ("fitted_bytes", 2**20),
    "uplink_mbps": ("uplink_bps", 1e6),
    "downlink_mbps": ("downlink_bps", 1e6),
    "idle_w": ("idle_w", 1),
    "train_w": ("train_w", 1),
    "battery_wh": ("battery_wh", 1),
}
_WHOLE = ("cores", "memory_mib")
_BUSY = ("train_w", "transmit_w", "receive_w")


def check_target(path: Path) -> None:
    """Check that `--board` accepts a file of this name.

    Raises:
        SettingError: `--board` does not accept such a name.
    """
    if path.suffix != ".toml" or path.stem == firmware_profiles.UNKNOWN:
        raise SettingError(
            f"--save {path}: choose a file name that ends in .toml, other than"
            f" {firmware_profiles.UNKNOWN}.toml"
        )


def save(found: BoardMeasurement, path: Path) -> None:
    """Write the measured board as a profile for `--board`.

    Raises:
        SettingError: the file cannot be written, or a measured figure is out of any board's range.
    """
    try:
        firmware_profiles.save(path, as_profile(found))
    except ProfileError as problem:
        raise SettingError(str(problem)) from None


def as_profile(found: BoardMeasurement) -> Profile:
    """Return the matching profile with measured figures in place of its own.

    Raises:
        ProfileError: a measured figure is out of its range.
    """
    known = firmware_profiles.load(found.board).profile
    figures = dict(_measured(found))
    idle_w = figures.get("idle_w", known.figures.idle_w).value
    for key in _BUSY:
        if figures.get(key, getattr(known.figures, key)).value < idle_w:
            figures[key] = Figure(idle_w, ESTIMATE, "at least the idle draw")
    title = found.figures["model"].value or found.figures["processor"].value or known.title
    try:
        return Profile(str(title)[:100], replace(known.figures, **figures))
    except ValueError as problem:
        raise ProfileError(str(problem)) from None


def _measured(found: BoardMeasurement) -> Iterator[tuple[str, Figure[Any]]]:
    """Yield each known figure of this board with its key in `Figures`."""
    for key, (name, scale) in _KEYS.items():
        figure = found.figures.get(name)
        if figure is not None and isinstance(figure.value, int | float) and figure.note != PROCESSOR_ALONE:
            value = _rounded(figure.value / scale)
            yield key, Figure(int(value) if key in _WHOLE else value, MEASURED, figure.note)
    speed = next((one.samples_per_s for one in found.training if one.ratio == 1), None)
    if speed is not None and found.flops_per_sample is not None:
        gflops = _rounded(speed * found.flops_per_sample / 1e9)
        yield "training_gflops", Figure(gflops, MEASURED, f"training {found.trained}")
    if found.sensors:
        yield "sensors", Figure(found.sensors, MEASURED)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
