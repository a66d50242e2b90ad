"""`edge-coordinator service`: the loop around the supervisor, and the files that `status` reads.

The folder of a service holds:
    *.toml              the runs; they may be added, changed and removed at any time
    runs/NAME           the folder of each run, with its control file
    .service/lock       locked by the running service
    .service/ports.json the port of each fleet's embedded broker
    .service/runs.json  the state of each run
    .service/NAME.log   the output of a run
"""

import contextlib
import difflib
import signal
import threading
import time
from collections import Counter
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
from fleetune.protocols.systemd.notify import service_manager

OWN, RUNS, NOTES = ".service", "runs", "runs.json"
LOOK_EVERY_S = 0.25


class ServiceRunStatus(Struct, frozen=True):
    """The state of one run, as the service stores it.

    Attributes:
        name, fleet, file: the names of the run, its fleet and its settings file.
        state, words: the state and its reason, see `supervisor.SupervisedRun`.
        pid: the id of the run's process; None if there is none.
    """

    name: str
    fleet: str
    file: str
    state: str
    words: str = ""
    pid: int | None = None


@dataclass
class Service:
    """Supervises the runs of one folder.

    Attributes:
        folder: the folder of the service.
        supervisor: starts and ends the runs.
        stopping: an event; setting it ends the service.
    """

    folder: Path
    supervisor: Supervisor
    stopping: threading.Event = field(default_factory=threading.Event)
    _noted: bytes = b""

    def run(self) -> None:
        """Supervise the runs until `stopping` is set, then end all processes."""
        # asked before the first run starts, so that no run inherits the connection to the service manager
        files, manager = RunFiles(self.folder), service_manager()
        while not self.stopping.wait(LOOK_EVERY_S):
            manager.beat(time.monotonic())
            self.supervisor.look(files.look(), time.monotonic())
            self._note()
            manager.ready()
        manager.stopping()
        while not self.supervisor.end(time.monotonic()):
            manager.beat(time.monotonic())
            time.sleep(LOOK_EVERY_S)
        self._note()

    def stop_at_signals(self) -> None:
        """Set `stopping` when SIGTERM or SIGINT arrives."""
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
            with contextlib.suppress(StoreError):  # the disk is full, so `status` shows the state before
                write_atomically(self.folder / OWN / NOTES, data)
                self._noted = data
            service_manager().status(_counted(notes))


def _counted(notes: list[ServiceRunStatus]) -> str:
    """Return one line that counts the runs in each state. It names no reason, which could hold a secret."""
    counts = Counter(note.state for note in notes)
    return f"{len(notes)} runs" + "".join(f", {number} {state}" for state, number in counts.items())


@contextlib.contextmanager
def held(folder: Path) -> Iterator[Path]:
    """Lock a folder for one service during this context; yields the folder of the service's own files.

    Raises:
        SettingError: there is no such folder, or another service uses it.
        StoreError: the folder cannot be written.
    """
    if not folder.is_dir():
        raise SettingError(f"{folder} is not a folder: name the folder that holds your run.toml files")
    own = folder / OWN
    make_folder(own)
    keep_private(own)
    if is_claimed(own):
        raise SettingError(f"another service already uses {folder}: stop that service first")
    with claim(own):
        yield own


def read_statuses(folder: Path) -> list[ServiceRunStatus]:
    """Return the state of each run as the service in this folder last stored it; [] if no service ever ran.

    Raises:
        StoreError: the file is damaged.
    """
    path = folder / OWN / NOTES
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[ServiceRunStatus])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.MsgspecError) as problem:
        raise StoreError(f"{path} cannot be read: {problem}") from None


def is_service(folder: Path) -> bool:
    """True if a service runs, or ran, in this folder."""
    return (folder / OWN).is_dir()


def folder_of(run: str, service: Path) -> Path:
    """Return the folder of the run that a command is for.

    Args:
        run: the run's folder, or the run's name in a service.
        service: the folder of that service.

    Raises:
        SettingError: there is no such run.
        StoreError: the file with the service's run states is damaged.
    """
    if (Path(run) / STATE).exists():
        return Path(run)
    if not is_service(service):
        raise SettingError(
            f"{run} holds no run: name a run's folder, e.g. runs/demo, or the name of a run in a service"
            " with --service"
        )
    known = [note.name for note in read_statuses(service)]
    if run not in known:
        near = difflib.get_close_matches(run, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"its runs: {', '.join(known) or 'none'}"
        raise SettingError(f"the service in {service} has no run {run!r}; {hint}")
    return service / RUNS / run
