"""Removes a device from the files next to a run's store: reports, journal, logs and incomplete payloads."""

import io
import os
import re
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from fleetune.coordinator.metrics.summary import SUMMARY, encoded
from fleetune.coordinator.reports.report import summary_of
from fleetune.coordinator.rounds.records import lines_of
from fleetune.coordinator.run.round_journal import ROUNDS
from fleetune.coordinator.run.stored_run import Run, save_shared_model
from fleetune.coordinator.serving.console_output import report_run
from fleetune.coordinator.store.run_folder import BROKER, INCOMING, PICTURES, SHARED
from fleetune.protocols.errors import StoreError
from fleetune.protocols.files import remove, remove_tree, write_atomically
from fleetune.protocols.one_line import mentions

_REPORT = "report.html"
_SERVICE_LOGS = ".service"  # see `coordinator.service.service`, which is above this module
_BLOCK_BYTES = 2**20
_CONNECTION = re.compile(rb"(?: from |\[)(\S+:\d+)\b")  # a peer's address and port, as mosquitto logs it


def remove_from_files(run: Run, device: str) -> dict[str, int]:
    """Remove a device from the files of a run whose store does not know it any more.

    Returns:
        The number of removed things by kind; empty if the files did not know it.

    Raises:
        StoreError: a file cannot be written or removed.
    """
    folder, incoming = run.folder, run.folder / INCOMING / device
    parts = len(list(incoming.iterdir())) if incoming.is_dir() else 0
    if incoming.is_dir():
        remove_tree(incoming)
    lines = remove_from_logs(folder, device)
    found = {"incomplete_payload": parts, "log_line": lines, "report_file": _write_reports(run, device)}
    return {kind: number for kind, number in found.items() if number}


def remove_from_logs(folder: Path, device: str) -> int:
    """Remove the lines that mention a device from a run's logs, and return their number.

    Raises:
        StoreError: a log cannot be written.
    """
    return sum(_without_lines(log, device) for log in log_files(folder))


def files_that_mention(folder: Path, device: str) -> list[str]:
    """Return the names of files in a run's folder that still contain a device's id."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())
    return [str(path.relative_to(folder)) for path in paths if _mentions(path, device)]


def log_files(folder: Path) -> Iterator[Path]:
    """Yield the logs of a run: its broker's, and its own if a service runs it."""
    broker = sorted((folder / BROKER).glob("*.log*"))
    service = sorted((folder.parent.parent / _SERVICE_LOGS).glob(f"{folder.name}.log*"))
    yield from (path for path in (*broker, *service) if path.is_file() and not path.is_symlink())


def _write_reports(run: Run, device: str) -> int:
    """Write anew what stands there of summary, pictures, page, journal and model; return the number of files
    that mentioned the device.
    """
    folder = run.folder
    texts = [folder / name for name in (SUMMARY, _REPORT, ROUNDS)]
    stale = [path for path in texts if path.is_file() and _mentions(path, device)]
    if not stale:
        return 0
    if (folder / _REPORT).is_file():
        pictures = {folder / f"{name}.png" for name in PICTURES}
        _, written = report_run(run, Console(file=io.StringIO()))
        for picture in pictures.difference(written):
            remove(picture)
    elif (folder / SUMMARY).is_file():
        write_atomically(folder / SUMMARY, encoded(summary_of(run, simulated=False)), mode=None)
    if (folder / SHARED).is_file():  # some methods' shared model is the mean of their devices' models
        save_shared_model(run)
    if (folder / ROUNDS).is_file():
        write_atomically(folder / ROUNDS, lines_of(run.controller.records()))
    return len(stale)


def _without_lines(log: Path, device: str) -> int:
    """Remove the lines that mention a device from a log, which its process may be extending; return their
    number.
    """
    if not _mentions(log, device):
        return 0
    try:
        with log.open("r+b") as file:
            lines = file.read().splitlines(keepends=True)
            kept = _about_others(lines, device)
            kept.append(file.read())  # written meanwhile
            file.seek(0)
            file.write(b"".join(kept))
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
    except OSError as problem:
        raise StoreError(f"cannot write {log}: {problem.strerror}") from None
    return len(lines) - len(kept) + 1


def _about_others(lines: list[bytes], device: str) -> list[bytes]:
    """Return the lines of a log that are not about a device or about one of its connections."""
    its = {line for line in lines if mentions(line.decode("utf-8", "replace"), device)}
    ends = {end for line in its for end in _CONNECTION.findall(line)}
    return [line for line in lines if line not in its and ends.isdisjoint(_CONNECTION.findall(line))]


def _mentions(path: Path, device: str) -> bool:
    """True if a file contains the id as a whole word."""
    before = ""
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                text = before + block.decode("latin-1")
                if mentions(text, device):
                    return True
                before = text[-2 * len(device) :]
    except OSError as problem:
        raise StoreError(f"cannot read {path}: {problem.strerror}") from None
    return False
