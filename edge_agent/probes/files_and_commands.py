"""Reading one value from one file or one command; None when it cannot be had."""

import math
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

Run = Callable[[list[str]], str | None]
"""From a command line to what the command printed; None: it is not installed, failed or took too long."""

ROOT = Path("/")
COMMAND_S = 5.0
_LARGEST_FILE = 2**20


def read_text(path: Path) -> str | None:
    """The file's text without surrounding white space and zero bytes, at most its first MiB."""
    try:
        with path.open("rb") as file:
            return file.read(_LARGEST_FILE).decode(errors="replace").strip(" \t\r\n\0")
    except (OSError, ValueError):
        return None


def number(value: object, low: float, high: float) -> float | None:
    """`value` as a number if it is one, or is a text that is one, from `low` to `high`; else None."""
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if low <= found <= high else None  # also refuses NaN


def read_number(path: Path, low: float, high: float) -> float | None:
    """The number that is the file's only content, if it is from `low` to `high`; else None."""
    return number(read_text(path), low, high)


def matches(root: Path, pattern: str) -> list[Path]:
    """Paths below `root` that fit a glob pattern, sorted."""
    try:
        return sorted(root.glob(pattern))
    except (OSError, ValueError):
        return []


def fields(text: str | None) -> dict[str, str]:
    """Lines of `name: value` or `name value`, as /proc writes them, by name."""
    pairs = (line.replace(":", " ", 1).split(maxsplit=1) for line in (text or "").splitlines())
    return {pair[0]: pair[1].strip() for pair in pairs if len(pair) == 2}


def run_command(words: list[str]) -> str | None:
    """Run an external command, for at most `COMMAND_S`, and return what it printed; see `Run`."""
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
    """A `Run` that asks each command at most every `every_s`, and one that failed a tenth as often.

    Args:
        run: what really runs them.
        clock: seconds that never jump.
        every_s: between two runs of the same command line; between them the last answer stands.
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
    """The JSON object that a text is; an empty one for anything else."""
    try:
        found = msgspec.json.decode(text or "")
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return {}
    return found if isinstance(found, dict) else {}
