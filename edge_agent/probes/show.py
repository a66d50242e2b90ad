"""Prints a measured board as a table or as JSON."""

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from fleetune.edge_agent.probes.board_measurement import BoardMeasurement, Figure

UNKNOWN = "unknown"
_NAMES = {
    "model": "board",
    "processor": "processor",
    "cores": "cores",
    "fitted_bytes": "memory",
    "memory_bytes": "available memory",
    "cgroup_limit_bytes": "memory limit",
    "taken_bytes": "memory taken",
    "power": "power",
    "battery": "battery",
    "battery_wh": "battery holds",
    "watts": "draws now",
    "idle_w": "draws idle",
    "train_w": "draws training",
    "celsius": "temperature",
    "throttled": "throttled",
    "metered": "metered",
    "uplink_bps": "uplink",
    "downlink_bps": "downlink",
    "round_trip_s": "round trip",
}


def as_json(found: BoardMeasurement) -> bytes:
    """Return one JSON object. Unknown figures are null, with the reason in their note."""
    return msgspec.json.format(msgspec.json.encode(found), indent=2)


def as_table(found: BoardMeasurement) -> Group:
    """Return a table of the figures and a table of the training speed by ratio."""
    figures = _table("", "", "", numbers=())
    for name, label in _NAMES.items():
        if name in found.figures:
            one = found.figures[name]
            value = Text(readable(name, one), style="dim" if one.value is None else "")
            figures.add_row(label, value, Text(one.note, style="dim"))
    figures.add_row("profile", found.board, Text(", ".join(found.sensors) or "no sensor", style="dim"))
    if not found.training:
        figures.add_row("training", Text(UNKNOWN, style="dim"), Text(found.trained, style="dim"))
        return Group(figures)
    speeds = _table("p", "samples/s", "peak memory", numbers=(0, 1, 2))
    for speed in found.training:
        peak = UNKNOWN if speed.peak_bytes is None else f"{speed.peak_bytes / 1e6:.0f} MB"
        speeds.add_row(f"{speed.ratio:g}", f"{speed.samples_per_s:.4g}", peak)
    return Group(figures, Text(f"\ntraining {found.trained}", style="dim"), speeds)


def readable(name: str, figure: Figure) -> str:
    """Return a figure with its unit as people write it: 1.1 GB, 11.3 Mbit/s, 45 ms, 62 %, yes."""
    match figure.value, figure.unit:
        case None, _:
            return "none" if name == "cgroup_limit_bytes" else UNKNOWN
        case bool(), _:
            return "yes" if figure.value else "no"
        case int() | float() as value, unit:
            return _number(name, value, unit)
        case value, _:
            return str(value)


def _number(name: str, value: float, unit: str) -> str:
    match unit:
        case "B":
            return f"{value / 1e9:.3g} GB" if value >= 1e9 else f"{value / 1e6:.3g} MB"
        case "bit/s":
            return f"{value / 1e6:.3g} Mbit/s"
        case "s":
            return f"{value * 1000:.3g} ms"
        case "degC":
            return f"{value:.1f} °C"
        case "W" | "Wh":
            return f"{value:.3g} {unit}"
        case _:
            return f"{value:.0%}" if name == "battery" else f"{value:g}"


def _table(*columns: str, numbers: tuple[int, ...]) -> Table:
    headed = any(columns)
    table = Table(box=SIMPLE_HEAD if headed else None, show_header=headed, pad_edge=False, show_edge=False)
    for position, column in enumerate(columns):
        table.add_column(column, justify="right" if position in numbers else "left", overflow="fold")
    return table
