"""qemu's user-mode emulation: this kernel runs arm64 programs, through its binfmt_misc."""

import platform
import shutil
from pathlib import Path

from fleetune.protocols.errors import SettingError
from fleetune.tools.links.shaping import run

BINFMT = Path("/proc/sys/fs/binfmt_misc")
NAME, QEMU, PACKAGE = "fleetune-arm64", "qemu-aarch64-static", "qemu-user-static"
# ELF, 64 bit, little-endian; an executable or a shared object; for AArch64 (183)
_MAGIC = bytes.fromhex("7f454c460201010000000000000000000200b700")
_MASK = bytes.fromhex("ffffffffffffff00fffffffffffffffffeffffff")


def is_needed() -> bool:
    """Whether this machine is no arm64 one itself."""
    return platform.machine() not in {"aarch64", "arm64"}


def ensure() -> None:
    """Make this kernel run arm64 programs, until its next start; harmless when it does already.

    Raises:
        SettingError: there is no qemu, or the kernel does not let us.
    """
    if not is_needed():
        return
    qemu = shutil.which(QEMU)
    if qemu is None:
        raise SettingError(f"there is no {QEMU} here: apt install {PACKAGE}")
    if not (BINFMT / "register").exists():
        run("mount", "-t", "binfmt_misc", "binfmt_misc", str(BINFMT))
    if any(_serves(file.read_text()) for file in BINFMT.iterdir() if file.name not in {"register", "status"}):
        return
    try:
        (BINFMT / "register").write_text(f":{NAME}:M::{_escaped(_MAGIC)}:{_escaped(_MASK)}:{qemu}:F")
    except OSError as problem:
        raise SettingError(
            f"{BINFMT}: the kernel does not take {qemu} for arm64 programs: {problem}"
        ) from None


def _serves(handler: str) -> bool:
    """Whether it emulates arm64, and was opened beforehand (flag F): another root does not have its file."""
    lines = handler.splitlines()
    flags = next((line for line in lines if line.startswith("flags:")), "")
    return lines[0] == "enabled" and f"magic {_MAGIC.hex()}" in lines and "F" in flags.removeprefix("flags:")


def _escaped(numbers: bytes) -> str:
    return "".join(f"\\x{number:02x}" for number in numbers)
