"""The files of an agent, in the folder of one device in one fleet.

The folder holds:
    bundles/<digest>            models for training without torch; one may serve many runs
    backbones/<digest>          frozen parts of models; one may serve many runs
    runs/<run>/enrolment        the enrolment that the device joined with
    runs/<run>/bundle           the digest of the run's bundle
    runs/<run>/backbone         the digest of the run's backbone
    runs/<run>/session          personal model, method state, last reply: one file, one write
    runs/<run>/allowance        the ratio controller: the costs of past rounds and the chosen ratio
    runs/<run>/task-<transfer>  the current task, so that it is not downloaded twice
    deployed                    the model that the device deploys, from any run
    samples.sqlite[-wal|-shm]   samples of a stream, see edge_agent.stream; has its own format versions
    versions/<number>           the latest models that it has deployed, in runs with [adoption]
    pin                         the version that the owner has pinned
    decisions                   the latest adoption decisions, for `edge-agent models`
    publish                     path of the deployed model's ONNX file for an app
    incoming/*.part             payloads that are not complete yet
    lock                        held by the agent that runs
    fleetune-agent              marks the folder as an agent's; only files of marked folders are removed.
                                It holds the device's name for people, if that is not its id

Each file begins with its format version (edge_agent/state/state_versions.py). Add each new name to
`edge_agent/state/state_folder.py` too; otherwise a wipe leaves the file behind.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol, Self

from fleetune.edge_agent.state import state_folder
from fleetune.edge_agent.state.state_versions import PRESENT, Layout
from fleetune.protocols.errors import PacketForeign, StoreError
from fleetune.protocols.files import FileMark, mark_of, remove, write_atomically
from fleetune.protocols.model.backbone_file import mapped
from fleetune.protocols.wire.transfer import digest_of

RUNS_WITH_BACKBONES = 4  # backbones of this many latest runs are kept

_RUN = re.compile(r"[A-Za-z0-9_-]{1,96}")
_TRANSFER = re.compile(r"[0-9a-f]{32}")  # also matches a digest


class Memory(Protocol):
    """One stored value, which is replaced as a whole.

    Attributes:
        plain: True to write values fast and uncompressed, False to write few bytes.
    """

    @property
    def plain(self) -> bool: ...

    def read(self) -> bytes | None: ...

    def write(self, data: bytes | Iterable[bytes]) -> None: ...


@dataclass(frozen=True)
class FileMemory:
    """One value in one file, which is replaced as a whole.

    Attributes:
        path: path of the file.
        layout: formats of this kind of file.
        durable: True if written values survive a power cut; simulations do without.
    """

    path: Path
    layout: Layout = PRESENT
    durable: bool = True

    @property
    def plain(self) -> bool:
        """True for values that need not last. Durable values are compressed to spare a device's flash."""
        return not self.durable

    @property
    def identity(self) -> FileMark | None:
        """A value that changes when the file is replaced; None if the file is missing."""
        return mark_of(self.path)

    def read(self) -> bytes | None:
        """Read the value; None if nothing was written yet.

        Raises:
            StoreError: the file cannot be read.
            StoreVersion: the file has an unsupported format.
        """
        try:
            with self.path.open("rb") as file:
                return self.layout.read(file)
        except FileNotFoundError:
            return None
        except OSError as problem:
            raise StoreError(f"cannot read {self.path}: {problem.strerror}") from None

    def write(self, data: bytes | Iterable[bytes]) -> None:
        """Replace the value by these bytes, or by these pieces of it.

        Raises:
            StoreError: the file cannot be written.
        """
        write_atomically(self.path, data, head=self.layout.head, durable=self.durable)


@dataclass(frozen=True)
class AgentStore:
    """The state folder of one agent."""

    folder: Path

    @classmethod
    def of(cls, state: Path, fleet: str | None, device: str | None = None, name: str | None = None) -> Self:
        """Return the store of a device. For the arguments, see `state_folder.device_folder`.

        Raises:
            SettingError, StoreError: as `state_folder.device_folder` and `state_folder.check_format`.
        """
        folder = state_folder.device_folder(state, fleet, device, name)
        state_folder.check_format(folder)
        return cls(folder)

    @property
    def device(self) -> str:
        """The device's id."""
        return self.folder.name

    @property
    def incoming(self) -> Path:
        return self.folder / "incoming"

    def claim(self) -> IO[bytes]:
        """Lock the folder until the returned file is closed or this process ends.

        Raises:
            StoreError: another agent holds the lock, or the folder cannot be written.
            StoreVersion: the folder has another format.
        """
        return state_folder.claim(self.folder)

    def enrolment(self, run: str) -> FileMemory:
        """Return the file of the enrolment with which the device joined this run.

        Raises:
            PacketForeign: `run` is no valid name of a run (it becomes a folder).
        """
        return FileMemory(self._run(run) / "enrolment")

    def session(self, run: str) -> FileMemory:
        """Return the file of the personal model, the method's state and the last reply in this run.

        Raises:
            PacketForeign: `run` is no valid name of a run.
        """
        return FileMemory(self._run(run) / "session")

    @property
    def deployed(self) -> FileMemory:
        """The model that the device deploys, see `edge_agent.extensions.adoption.deployed_model`."""
        return FileMemory(self.folder / "deployed")

    @property
    def samples(self) -> Path:
        """The file of a stream's samples, see `edge_agent.stream`."""
        return self.folder / "samples.sqlite"

    def keep_bundle(self, run: str, payload: bytes) -> None:
        """Store a run's bundle under its digest.

        Raises:
            PacketForeign: `run` is no valid name of a run.
            StoreError: the bundle cannot be written.
        """
        digest = digest_of(payload)
        FileMemory(self.folder / "bundles" / digest).write(payload)
        FileMemory(self._run(run) / "bundle").write(digest.encode())

    def adopt_bundle(self, run: str, digest: str) -> bool:
        """Use the stored bundle with this digest, from an earlier run, for this run too.

        Returns:
            True if the bundle is stored and complete.

        Raises:
            PacketForeign: `run` is no valid name of a run.
            StoreError: the bundle cannot be read or written.
        """
        payload = self._bundle(digest)
        if payload is not None:
            FileMemory(self._run(run) / "bundle").write(digest.encode())
        return payload is not None

    def bundle(self, run: str) -> bytes | None:
        """Read a run's bundle; None if it is missing or damaged.

        Raises:
            PacketForeign: `run` is no valid name of a run.
            StoreError: the bundle cannot be read.
        """
        digest = FileMemory(self._run(run) / "bundle").read()
        return None if digest is None else self._bundle(digest.decode("ascii", "replace"))

    def _bundle(self, digest: str) -> bytes | None:
        if not _TRANSFER.fullmatch(digest):
            return None
        payload = FileMemory(self.folder / "bundles" / digest).read()
        return payload if payload is not None and digest_of(payload) == digest else None

    def want_backbone(self, run: str, digest: str) -> None:
        """Record the digest of a run's backbone, which may or may not be stored.

        Raises:
            PacketForeign: `run` is no valid name of a run.
            StoreError: the digest cannot be written.
        """
        if self.wanted_backbone(run) != digest:
            FileMemory(self._run(run) / "backbone").write(digest.encode())

    def wanted_backbone(self, run: str) -> str | None:
        """Return the digest of a run's backbone; None if no backbone is known for the run.

        Raises:
            PacketForeign: `run` is no valid name of a run.
            StoreError: the digest cannot be read.
        """
        digest = FileMemory(self._run(run) / "backbone").read()
        return None if digest is None else digest.decode("ascii", "replace")

    def keep_backbone(self, payload: bytes, used_by: Collection[str] = ()) -> None:
        """Store a backbone under its digest, and remove unused ones.

        A backbone is in use by the latest `RUNS_WITH_BACKBONES` runs and by the runs in `used_by`.

        Raises:
            StoreError: the backbone cannot be written, or an unused one cannot be removed.
        """
        digest = digest_of(payload)
        FileMemory(self.folder / "backbones" / digest).write(payload)
        runs = {*self.runs()[:RUNS_WITH_BACKBONES], *used_by}
        used = {digest, *(self.wanted_backbone(run) for run in runs)}
        for path in (self.folder / "backbones").glob("*"):
            if path.name not in used and _TRANSFER.fullmatch(path.name):
                remove(path)

    def backbone(self, digest: str) -> memoryview | None:
        """Return a stored, complete backbone, memory-mapped so that pages are read on use; None if missing.

        Raises:
            StoreError: the file cannot be read.
            StoreVersion: the file has an unsupported format.
        """
        if not _TRANSFER.fullmatch(digest):
            return None
        path = self.folder / "backbones" / digest
        try:
            with path.open("rb") as file:
                start = PRESENT.skip_head(file)
        except FileNotFoundError:
            return None
        except OSError as problem:
            raise StoreError(f"cannot read {path}: {problem.strerror}") from None
        content = None if start is None else mapped(path, start)
        return content if content is not None and digest_of(content) == digest else None

    def ratio_controller(self, run: str) -> FileMemory:
        """Return the file of this run's ratio controller, see `edge_agent.budget.ratio_controller`.

        Raises:
            PacketForeign: `run` is no valid name of a run.
        """
        return FileMemory(self._run(run) / "allowance")

    def task(self, run: str, transfer: str) -> FileMemory:
        """Return the file of the task that this transfer delivered.

        Raises:
            PacketForeign: `run` is no valid name of a run, or `transfer` is no transfer id.
        """
        if not _TRANSFER.fullmatch(transfer):
            raise PacketForeign(f"{transfer!r} is no transfer id")
        return FileMemory(self._run(run) / f"task-{transfer}")

    def keep_task(self, run: str, transfer: str, payload: bytes) -> None:
        """Store the current task in place of the one before.

        Raises:
            StoreError: the task cannot be written.
        """
        stored = self.task(run, transfer)
        stored.write(payload)
        self.forget_tasks(run, but=stored.path)

    def has_task(self, run: str) -> bool:
        return any(self._run(run).glob("task-*"))

    def forget_tasks(self, run: str, but: Path | None = None) -> None:
        """Remove the tasks of a run, except the one at `but`.

        Raises:
            StoreError: a task cannot be removed.
        """
        for path in self._run(run).glob("task-*"):
            if path != but:
                remove(path)

    def runs(self) -> list[str]:
        """Return the ids of the runs with stored files, the latest first."""
        found = [path for path in (self.folder / "runs").glob("*") if path.is_dir()]
        return [path.name for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)]

    def _run(self, run: str) -> Path:
        if not _RUN.fullmatch(run):
            raise PacketForeign(f"{run!r} is no name of a run")
        return self.folder / "runs" / run
