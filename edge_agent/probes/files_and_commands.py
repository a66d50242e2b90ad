"""Reads one value from a file or from a command's output; None if it cannot be read."""

import math
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

Run = Callable[[list[str]], str | None]
"""A function that runs a command line and returns its output; None if the command is missing, fails or takes
too long.
"""

ROOT = Path("/")
COMMAND_S = 5.0
_LARGEST_FILE = 2**20


def read_text(path: Path) -> str | None:
    """Return the first MiB of a file's text, without surrounding white space and zero bytes."""
    try:
        with path.open("rb") as file:
            return file.read(_LARGEST_FILE).decode(errors="replace").strip(" \t\r\n\0")
    except (OSError, ValueError):
        return None


def number(value: object, low: float, high: float) -> float | None:
    """Return `value`, a number or its text, as a number from `low` to `high`; else None."""
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if low <= found <= high else None  # this also rejects NaN


def read_number(path: Path, low: float, high: float) -> float | None:
    """Return the only number in a file, if it is from `low` to `high`; else None."""
    return number(read_text(path), low, high)


def matches(root: Path, pattern: str) -> list[Path]:
    """Return the paths below `root` that match a glob pattern, sorted."""
    try:
        return sorted(root.glob(pattern))
    except (OSError, ValueError):
        return []


def fields(text: str | None) -> dict[str, str]:
    """Return values by name, from lines of `name: value` or `name value` as in /proc."""
    pairs = (line.replace(":", " ", 1).split(maxsplit=1) for line in (text or "").splitlines())
    return {pair[0]: pair[1].strip() for pair in pairs if len(pair) == 2}


def run_command(words: list[str]) -> str | None:
    """Run an external command for at most `COMMAND_S` seconds and return its output, see `Run`."""
    program = shutil.which(words[0])
    if program is None:
        return None
    try:
        done = subprocess.run(  # noqa: S603 - our own command lines
            [program, *words[1:]],
            capture_output=True,
            timeout=COMMAND_S,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")


class CachedCommands:
    """A `Run` that caches each command's output. It retries a failed command only after ten times as long.

    Args:
        run: runs the commands.
        clock: monotonic seconds.
        every_s: seconds for which an output is reused.
    """

    def __init__(self, run: Run, clock: Callable[[], float], every_s: float = 60.0) -> None:
        self._run, self._clock, self._every_s = run, clock, every_s
        self._answers: dict[tuple[str, ...], tuple[float, str | None]] = {}
        self._lock = threading.Lock()

    def __call__(self, words: list[str]) -> str | None:
        with self._lock:
            now, command = self._clock(), tuple(words)
            until, answer = self._answers.get(command, (-math.inf, None))
            if now >= until:
                answer = self._run(words)
                until = now + self._every_s * (10 if answer is None else 1)
                self._answers[command] = until, answer
            return answer


def json_object(text: str | None) -> dict[str, Any]:
    """Return the JSON object in a text, or an empty one."""
    try:
        found = msgspec.json.decode(text or "")
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return {}
    return found if isinstance(found, dict) else {}
