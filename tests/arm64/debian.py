"""An arm64 Debian in a folder: debootstrap fetches and unpacks it, then its own programs set it up."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.arm64 import emulator
from tests.arm64.enter import command

from fleetune.protocols.errors import SettingError, StoreError

SUITES = "bookworm", "trixie"  # Python 3.11 and 3.13
MIRROR = "http://deb.debian.org/debian"
PACKAGES = "python3,python3-venv,ca-certificates"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
NEEDED_BYTES = (
    1_000_000_000  # 300 MB for Debian, 210 MB for an agent with onnxruntime, and the packages meanwhile
)
MARK, LOG, FETCHED = ".fleetune-arm64", ".fleetune-arm64.log", "var/cache/apt/archives"


@dataclass(frozen=True)
class Step:
    """Where the making stands.

    Attributes:
        stage: what is being done.
        words: the last thing that was done.
        done, total: number of things; a total that nobody knows is None.
    """

    stage: str
    words: str
    done: int
    total: int | None


def is_ready(root: Path) -> bool:
    """Whether an arm64 root was made here, wholly."""
    return _mark(root) == "ready"


def is_unpacked(root: Path) -> bool:
    """Whether its programs are there, if not set up yet."""
    return _mark(root) in {"unpacked", "ready"}


def make(root: Path, suite: str = SUITES[0], mirror: str = MIRROR) -> Iterator[Step]:
    """Make an arm64 root in the folder `root`, or go on with what an earlier try has fetched.

    Raises:
        SettingError: a command or a right is missing here, the folder holds something else, or debootstrap
            fails, as without a network.
        StoreError: the disk is too small.
    """
    _check(root, suite)
    if is_ready(root):
        return
    if _mark(root) is not None:
        _clear(root)
    root.mkdir(parents=True, exist_ok=True)
    (root / MARK).write_text("begun")
    fetch = ["debootstrap", "--arch=arm64", "--foreign", "--variant=minbase", "--force-check-gpg"]
    fetch += [f"--include={PACKAGES}", suite, str(root), mirror]
    yield from _watched("fetching and unpacking", fetch, root, None)
    (root / MARK).write_text("unpacked")
    packages = list((root / FETCHED).glob("*.deb"))
    set_up = command(root, "/debootstrap/debootstrap", "--second-stage")
    yield from _watched("setting up, emulated", set_up, root, 2 * len(packages))
    for package in packages:
        package.unlink()
    (root / MARK).write_text("ready")


def _clear(root: Path) -> None:
    """Keep what was fetched only: debootstrap cannot go on amid its second stage."""
    kept = root / ".fetched"
    if (root / FETCHED).is_dir() and not kept.exists():
        (root / FETCHED).rename(kept)
    for path in root.iterdir():
        if path.is_dir() and not path.is_symlink() and path != kept:
            shutil.rmtree(path)
        elif path.name != MARK and path != kept:
            path.unlink()
    if kept.exists():
        (root / FETCHED).parent.mkdir(parents=True)
        kept.rename(root / FETCHED)


def _mark(root: Path) -> str | None:
    try:
        return (root / MARK).read_text()
    except FileNotFoundError:
        return None


def _check(root: Path, suite: str) -> None:
    if suite not in SUITES:
        raise SettingError(f"--suite {suite}: choose {' or '.join(SUITES)}")
    if os.geteuid() != 0:
        raise SettingError("an arm64 root can be made by root only: sudo")
    if shutil.which("debootstrap") is None:
        raise SettingError("there is no debootstrap here: apt install debootstrap")
    if not KEYRING.exists():
        raise SettingError(f"there is no {KEYRING} here: apt install {KEYRING.stem}")
    emulator.ensure()
    if _mark(root) is None and root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise SettingError(f"{root} holds something else: name a folder that is empty or not there yet")
    disk = next(folder for folder in (root, *root.resolve().parents) if folder.exists())
    free = shutil.disk_usage(disk).free
    if not is_ready(root) and free < NEEDED_BYTES:
        raise StoreError(f"{disk}: {free / 1e6:.0f} MB are free, {NEEDED_BYTES / 1e6:.0f} MB are needed")


def _watched(stage: str, words: Sequence[str], root: Path, total: int | None) -> Iterator[Step]:
    yield Step(stage, "", 0, total)
    with (root / LOG).open("a") as log:
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            last, done = "", 0
            for line in process.stdout or ():
                log.write(line)
                last = line.strip() or last
                done += line.startswith(("I: Retrieving", "I: Unpacking ", "I: Configuring"))
                yield Step(stage, last.removeprefix("I: "), done, total)
        if process.returncode:
            raise SettingError(
                f"{stage}: {last}; see {root / LOG}; the same command tries again and keeps what was fetched"
            )
