"""Reads what a board's profile states about the device, before anything is measured on the device."""

from pathlib import Path

from fleetune import firmware_profiles
from fleetune.protocols.errors import SettingError
from fleetune.protocols.input_files import read_text_input
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.toml_text import parse_toml


def board_named(name: str) -> firmware_profiles.Board:
    """Load a board's profile by its name, or from the user's file (a name with "/" or ending in ".toml").

    Raises:
        SettingError: there is no such profile, or the file is missing or wrong.
    """
    try:
        if "/" in name or name.endswith(".toml"):
            text = read_text_input(
                Path(name), error=lambda line: SettingError(f"board {name} cannot be read: {line}")
            )
            parse_toml(text)
            return firmware_profiles.load_file(Path(name), text)
        return firmware_profiles.load(name)
    except (KeyError, ValueError, OSError) as problem:
        raise SettingError(str(problem.args[0] if isinstance(problem, KeyError) else problem)) from None


def report_of(
    device: str,
    board: firmware_profiles.Board,
    *,
    num_samples: int,
    flops_per_sample: float,
    uplink_bps: float | None = None,
    downlink_bps: float | None = None,
) -> DeviceReport:
    """Return the device's report before it has chosen a ratio.

    The board "generic" claims no figures: its speed and link stay unknown unless given here.
    """
    known = board.name != firmware_profiles.UNKNOWN
    return DeviceReport(
        device=device,
        board=board.name,
        num_samples=num_samples,
        samples_per_s=board.training_gflops * 1e9 / flops_per_sample if known and flops_per_sample else None,
        uplink_bps=uplink_bps or (board.uplink_bps if known else None),
        downlink_bps=downlink_bps or (board.downlink_bps if known else None),
        memory_bytes=board.memory_bytes if known else None,
    )
