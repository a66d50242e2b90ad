"""Becoming a program inside an arm64 root: same process, the host's network, its own view of the files.

What is mounted is seen by this process and its children only, and is gone with them.
"""

import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from tests.arm64 import emulator
from tests.arm64.processor import PROCESSORS, cpuinfo, describe_cores

from fleetune.protocols.errors import SettingError
from fleetune.tools.links.shaping import run

VENV = "/opt/fleetune"
HOME = "/root"
_PATH = f"{VENV}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PASSED_ON = "TERM", "COLUMNS", "NO_COLOR", "OMP_NUM_THREADS", "PYTHONUNBUFFERED", "DEBIAN_FRONTEND"
_NEW_MOUNT_NAMESPACE = 0x00020000  # CLONE_NEWNS


def command(root: Path, *words: str, cpu: str = "max", folders: Sequence[Path] = ()) -> list[str]:
    """A command for the host, given in the checkout, that runs `words` in `root`; see `enter`."""
    shared = [word for folder in folders for word in ("--share", str(folder))]
    return [sys.executable, "-P", "-m", "tests.arm64", "run", str(root), "--cpu", cpu, *shared, "--", *words]


def enter(root: Path, words: Sequence[str], cpu: str, folders: Sequence[Path]) -> NoReturn:
    """Run `words` in `root` instead of this program.

    Args:
        root: a folder with an arm64 system.
        words: the command.
        cpu: one of PROCESSORS; instructions that it lacks end the program (SIGILL). Ignored on an arm64 host.
        folders: of the host, seen inside under the same path.

    Raises:
        SettingError: no such processor, folder or command, or the kernel does not let us.
    """
    if cpu not in PROCESSORS:
        raise SettingError(f"--cpu {cpu}: choose one of {', '.join(PROCESSORS)}")
    for folder in folders:
        if not folder.is_dir():
            raise SettingError(f"--share {folder}: there is no such folder")
    emulator.ensure()
    _own_mounts()
    run("mount", "-t", "proc", "proc", f"{root}/proc")
    run("mount", "--rbind", "/dev", f"{root}/dev")
    _mount_sys(root, cpu)
    for folder in map(Path.resolve, folders):
        inside = root / folder.relative_to("/")
        inside.mkdir(parents=True, exist_ok=True)
        run("mount", "--rbind", str(folder), str(inside))
    os.chroot(root)
    os.chdir(HOME)
    try:
        os.execvpe(words[0], list(words), _environment(cpu))
    except OSError as problem:
        raise SettingError(f"{words[0]} does not start in {root}: {problem.strerror}") from None


def _own_mounts() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNT_NAMESPACE):
        raise SettingError(f"mount namespaces are not permitted here: {os.strerror(ctypes.get_errno())}")
    run("mount", "--make-rprivate", "/")


def _mount_sys(root: Path, cpu: str) -> None:
    """On an x86 host /sys tells of the wrong board: only the cores and the limits are there."""
    if not emulator.is_needed():
        run("mount", "--rbind", "/sys", f"{root}/sys")
        return
    num_cores = len(os.sched_getaffinity(0))
    run("mount", "-t", "tmpfs", "tmpfs", f"{root}/sys")
    describe_cores(root / "sys/devices/system/cpu", PROCESSORS[cpu], num_cores)
    (root / "sys/cpuinfo").write_text(cpuinfo(PROCESSORS[cpu], num_cores))
    run("mount", "--bind", f"{root}/sys/cpuinfo", f"{root}/proc/cpuinfo")
    (root / "sys/fs/cgroup").mkdir(parents=True)
    run("mount", "--rbind", "/sys/fs/cgroup", f"{root}/sys/fs/cgroup")


def _environment(cpu: str) -> dict[str, str]:
    """Most of the host's variables name files that are not there inside."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _PASSED_ON or name.startswith("FLEETUNE_") or name.lower().endswith("_proxy")
    }
    return {**kept, "PATH": _PATH, "HOME": HOME, "LANG": "C.UTF-8", "QEMU_CPU": cpu}
