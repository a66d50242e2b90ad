"""The files that a run leaves in its folder, and how to remove them and no others."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from fleetune.coordinator.store.folder_lock import LOCK, claim
from fleetune.protocols.errors import StoreError
from fleetune.protocols.files import remove_empty, remove_tree

STATE = "state.sqlite"
INCOMING, BROKER, DEVICES, MODELS = "incoming", "broker", "devices", "models"
PAST = "rounds-past.jsonl"  # records that the store of an open run has let go of
DAYS = "days.jsonl"  # of simulated devices whose data grow
SHARED = f"{MODELS}/shared.safetensors"
CONTROL = "control.json"  # requests of the run's owner, see `coordinator.commands`
BACKBONE = "backbone.safetensors"  # what is frozen in the run's model
PICTURES = ("accuracy-by-round", "accuracy-by-uplink", "accuracy-by-device", "bytes-by-round")
OURS = (
    *(INCOMING, BROKER, DEVICES, SHARED, BACKBONE),
    *("summary.json", "rounds.jsonl", "report.html", DAYS),
    *(PAST, f"{PAST}.1", CONTROL),
    *(f"{name}.png" for name in PICTURES),
    *(f"{STATE}-shm", f"{STATE}-wal", f"{STATE}-journal", STATE, LOCK),
)


def clear(folder: Path, *, durable: bool = True) -> None:
    """Remove the files that a run left in this folder; other files stay.

    Args:
        folder: the run's folder; without a run there, nothing is removed.
        durable: make sure that removed files do not come back after a power cut.

    Raises:
        StoreError: a coordinator has the run open, or the state file is not one of ours; nothing was removed.
            Or a file could not be removed.
    """
    if not (folder / STATE).exists():
        return
    _check_ours(folder / STATE)
    with claim(folder):
        for path in _found(folder):
            remove_tree(path, durable=durable)
        remove_empty(folder / MODELS, durable=durable)


def _found(folder: Path) -> Iterator[Path]:
    """Files of the run, its state last except for the lock, so that an interrupted removal can be
    repeated.
    """
    for name in OURS:
        yield from (path for path in (folder / name, folder / f"{name}.new") if path.exists())


def _check_ours(path: Path) -> None:
    """Check that a store is ours, of whatever format; a database of another program stays unchanged."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=1)) as file:
            tables = {name for (name,) in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.OperationalError as problem:
        if problem.sqlite_errorcode != sqlite3.SQLITE_BUSY:
            raise StoreError(f"cannot read {path}: {problem}") from None
        raise StoreError(f"another coordinator runs {path.parent}: stop it first") from None
    except sqlite3.DatabaseError as problem:
        raise StoreError(_strange(path, str(problem))) from None
    if tables and not {"value", "round"} <= tables:
        raise StoreError(_strange(path, f"it has tables {', '.join(sorted(tables)[:3])}"))


def _strange(path: Path, why: str) -> str:
    return f"{path} is not the state of a run ({why}): delete it yourself, or set another run.name"
