"""Identifies the board: its model, its processor, and the firmware profile that matches it."""

import os
import re
from pathlib import Path

from fleetune import firmware_profiles
from fleetune.edge_agent.probes.files_and_commands import ROOT, Run, matches, read_text, run_command
from fleetune.edge_agent.probes.memory import total_bytes
from fleetune.firmware_profiles.recognition import Machine

_ARM_PARTS = {
    "0xd03": "Cortex-A53",
    "0xd04": "Cortex-A35",
    "0xd05": "Cortex-A55",
    "0xd07": "Cortex-A57",
    "0xd08": "Cortex-A72",
    "0xd09": "Cortex-A73",
    "0xd0a": "Cortex-A75",
    "0xd0b": "Cortex-A76",
    "0xd0d": "Cortex-A77",
    "0xd41": "Cortex-A78",
    "0xd42": "Cortex-A78AE",
    "0xd44": "Cortex-X1",
    "0xd46": "Cortex-A510",
    "0xd47": "Cortex-A710",
}


def model(root: Path = ROOT, run: Run = run_command) -> str | None:
    """Return the vendor's name of the board, from the device tree, Android's property, or a PC's firmware
    (DMI).
    """
    for path in ("proc/device-tree/model", "sys/firmware/devicetree/base/model"):
        found = read_text(root / path)
        if found:
            return found
    if is_android(root):
        return (run(["getprop", "ro.product.model"]) or "").strip() or None
    return read_text(root / "sys/class/dmi/id/product_name") or None


def processor(root: Path = ROOT) -> str | None:
    """Return the processor's name on x86; on ARM, the names of its kinds of cores, joined by a plus."""
    info = read_text(root / "proc/cpuinfo") or ""
    named = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    if named and not named.group(1).startswith("ARMv"):
        return named.group(1).strip()
    parts = dict.fromkeys(re.findall(r"^CPU part\s*:\s*(0x[0-9a-f]{3})$", info, re.MULTILINE))
    kinds = [_ARM_PARTS.get(part, f"ARM part {part}") for part in parts]
    return " + ".join(kinds) or None


def num_cores(root: Path = ROOT) -> int | None:
    """Return the number of cores that are switched on and, if known, allowed for this process."""
    online = _count(read_text(root / "sys/devices/system/cpu/online"))
    if online is None:
        online = len(matches(root, "sys/devices/system/cpu/cpu[0-9]*")) or None
    if root != ROOT or not hasattr(os, "sched_getaffinity"):
        return online
    allowed = len(os.sched_getaffinity(0))
    return allowed if online is None else min(online, allowed)


def board_name(root: Path = ROOT, run: Run = run_command) -> str:
    """Return the firmware profile that matches this machine best, or "generic"."""
    machine = Machine(
        model=model(root, run),
        processor=processor(root),
        android=is_android(root),
        memory_bytes=total_bytes(root),
    )
    return firmware_profiles.recognised(machine)


def is_android(root: Path = ROOT) -> bool:
    """True if Android runs on this machine, recognised by its programs in /system."""
    return bool(matches(root, "system/bin/app_process") or matches(root, "system/build.prop"))


def _count(ranges: str | None) -> int | None:
    """Return the number of values in a list of ranges such as `0-3,5`; None if the text is no such list."""
    if not ranges or not re.fullmatch(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*", ranges):
        return None
    bounds = [part.split("-") for part in ranges.split(",")]
    return sum(max(0, int(part[-1]) - int(part[0]) + 1) for part in bounds) or None
