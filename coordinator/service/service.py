"""`edge-coordinator service`: the loop around a supervisor, and what is kept for `edge-coordinator status`.

What stands in the folder:
    *.toml              the runs; they may be added, changed and removed while the service is at work
    runs/NAME           each run's folder, with its control file
    .service/lock       held by the service that is at work
    .service/ports.json which port each fleet's embedded broker has
    .service/runs.json  how the service sees its runs
    .service/NAME.log   what a run said
"""

import contextlib
import difflib
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from msgspec import Struct

from fleetune.coordinator.service.run_files import RunFiles
from fleetune.coordinator.service.supervisor import Supervisor
from fleetune.coordinator.store.folder_lock import claim, is_claimed
from fleetune.coordinator.store.run_folder import STATE
from fleetune.protocols.errors import SettingError, StoreError
from fleetune.protocols.files import keep_private, make_folder, write_atomically

OWN, RUNS, NOTES = ".service", "runs", "runs.json"
LOOK_EVERY_S = 0.25


class ServiceRunStatus(Struct, frozen=True):
    """How a service sees a run.

    Attributes:
        name, fleet, file: of it.
        state, words: see `supervisor.SupervisedRun`.
        pid: of its process; None: there is none.
    """

    name: str
    fleet: str
    file: str
    state: str
    words: str = ""
    pid: int | None = None


@dataclass
class Service:
    """One folder of runs at work.

    Attributes:
        folder: of it.
        supervisor: of its runs.
        stopping: set when it shall end.
    """

    folder: Path
    supervisor: Supervisor
    stopping: threading.Event = field(default_factory=threading.Event)
    _noted: bytes = b""

    def run(self) -> None:
        """Look after the runs until told to stop, then end them all."""
        files = RunFiles(self.folder)
        while not self.stopping.wait(LOOK_EVERY_S):
            self.supervisor.look(files.look(), time.monotonic())
            self._note()
        while not self.supervisor.end(time.monotonic()):
            time.sleep(LOOK_EVERY_S)
        self._note()

    def stop_at_signals(self) -> None:
        """Stop when this process is told to end."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.stopping.set())

    def _note(self) -> None:
        watched = self.supervisor.watched.values()
        notes = [
            ServiceRunStatus(
                one.file.name,
                one.file.fleet,
                one.file.path.name,
                one.state,
                one.words,
                None if one.process is None else one.process.pid,
            )
            for one in sorted(watched, key=lambda one: one.file.name)
        ]
        data = msgspec.json.encode(notes)
        if data != self._noted:
            with contextlib.suppress(StoreError):  # a full disk: whoever asks sees how it was
                write_atomically(self.folder / OWN / NOTES, data)
                self._noted = data


@contextlib.contextmanager
def held(folder: Path) -> Iterator[Path]:
    """Hold a folder for one service, as long as this context; the service's own folder in it.

    Raises:
        SettingError: there is no such folder, or another service is at work in it.
        StoreError: it cannot be written.
    """
    if not folder.is_dir():
        raise SettingError(f"{folder} is no folder: name one that holds run.toml files")
    own = folder / OWN
    make_folder(own)
    keep_private(own)
    if is_claimed(own):
        raise SettingError(f"another service is at work in {folder}: stop it first")
    with claim(own):
        yield own


def read_statuses(folder: Path) -> list[ServiceRunStatus]:
    """How a service sees, or saw, the runs in its folder; () where none ever was.

    Raises:
        StoreError: what it left is damaged.
    """
    path = folder / OWN / NOTES
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[ServiceRunStatus])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.MsgspecError) as problem:
        raise StoreError(f"{path} cannot be read: {problem}") from None


def is_service(folder: Path) -> bool:
    """Whether a service is, or was, at work in this folder."""
    return (folder / OWN).is_dir()


def folder_of(run: str, service: Path) -> Path:
    """The folder of the run that a command is for.

    Args:
        run: its folder, or its name in a service.
        service: the folder of that service.

    Raises:
        SettingError: there is no such run.
        StoreError: the service's notes are damaged.
    """
    if (Path(run) / STATE).exists():
        return Path(run)
    if not is_service(service):
        raise SettingError(
            f"{run} holds no run: name the folder of one, e.g. runs/demo, or a service's run with --service"
        )
    known = [note.name for note in read_statuses(service)]
    if run not in known:
        near = difflib.get_close_matches(run, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known) or 'none'}"
        raise SettingError(f"the service in {service} has no run {run!r}; {hint}")
    return service / RUNS / run
