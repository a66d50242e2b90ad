"""What an agent keeps on disk, in a folder of one device in one fleet.

It holds:
    bundles/<digest>            models for training without torch; the same one serves many runs
    backbones/<digest>          what is frozen in models; the same one serves many runs
    runs/<run>/enrolment        what it started from
    runs/<run>/bundle           the digest of its bundle
    runs/<run>/backbone         the digest of its backbone
    runs/<run>/session          personal model, method state, last reply: one file, one write
    runs/<run>/allowance        what it can afford in it, by what past rounds took
    runs/<run>/task-<transfer>  the task at hand, so that it is not downloaded twice
    served                      the model that the device deploys, from whatever run
    samples.sqlite[-wal|-shm]   samples of a stream, see edge_agent.stream; it has versions of its own
    versions/<number>           the latest models that it has deployed, in runs with [adoption]
    pin                         the version of these that the owner wants
    decisions                   what was decided of late, for `edge-agent models`
    publish                     where the deployed model is written for an app, as ONNX
    incoming/*.part             payloads that are not complete yet
    lock                        held by the agent that runs
    fleetune-agent              says that an agent made all this; nothing else is ever removed

Each file begins with its format version (edge_agent/state/state_versions.py). A new name here must be
one that `edge_agent/state/state_folder.py` knows as ours, or it outlives a wipe.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from fleetune.edge_agent.state import state_folder
from fleetune.edge_agent.state.state_versions import PRESENT, Layout
from fleetune.protocols.errors import PacketForeign, StoreError
from fleetune.protocols.files import remove, write_atomically
from fleetune.protocols.model.backbone_file import mapped
from fleetune.protocols.wire.transfer import digest_of

RUNS_WITH_BACKBONES = 4  # the latest, whose backbones stay

_RUN = re.compile(r"[A-Za-z0-9_-]{1,96}")
_TRANSFER = re.compile(r"[0-9a-f]{32}")  # a digest too


class Memory(Protocol):
    """One stored value, which is replaced as a whole.

    Attributes:
        plain: values are written quickly rather than in few bytes.
    """

    @property
    def plain(self) -> bool: ...

    def read(self) -> bytes | None: ...

    def write(self, data: bytes) -> None: ...


@dataclass(frozen=True)
class FileMemory:
    """One value in one file, which is replaced as a whole.

    Attributes:
        path: of the file.
        layout: the formats of this kind of file.
        durable: what was written survives a power cut; simulations do without.
    """

    path: Path
    layout: Layout = PRESENT
    durable: bool = True

    @property
    def plain(self) -> bool:
        """What need not last is not packed: on a device it is, for the sake of its flash."""
        return not self.durable

    @property
    def identity(self) -> tuple[int, int] | None:
        """Another one when the file was replaced; None: it is not there."""
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    def read(self) -> bytes | None:
        """Read the value; None: nothing was written yet.

        Raises:
            StoreError: it cannot be read; StoreVersion: it has a format that is not read here.
        """
        try:
            with self.path.open("rb") as file:
                return self.layout.read(file)
        except FileNotFoundError:
            return None
        except OSError as problem:
            raise StoreError(f"cannot read {self.path}: {problem.strerror}") from None

    def write(self, data: bytes) -> None:
        """Replace the value.

        Raises:
            StoreError: it cannot be written.
        """
        write_atomically(self.path, data, head=self.layout.head, durable=self.durable)


@dataclass(frozen=True)
class AgentStore:
    """The state folder of one agent."""

    folder: Path

    @property
    def incoming(self) -> Path:
        return self.folder / "incoming"

    def claim(self) -> IO[bytes]:
        """Hold the folder until the returned file is closed, or this process ends in whatever way.

        Raises:
            StoreError: another agent holds it, or it cannot be written; StoreVersion: it has
                another format.
        """
        return state_folder.claim(self.folder)

    def enrolment(self, run: str) -> FileMemory:
        """What the device started this run from.

        Raises:
            PacketForeign: `run` is no name of a run (it becomes a folder).
        """
        return FileMemory(self._run(run) / "enrolment")

    def session(self, run: str) -> FileMemory:
        """The personal model, the method's state and the last reply in this run.

        Raises:
            PacketForeign: `run` is no name of a run.
        """
        return FileMemory(self._run(run) / "session")

    @property
    def deployed(self) -> FileMemory:
        """The model that the device deploys, see `edge_agent.extensions.adoption.deployed_model`."""
        return FileMemory(self.folder / "served")

    @property
    def samples(self) -> Path:
        """The file of the samples that come by and by, see `edge_agent.stream`."""
        return self.folder / "samples.sqlite"

    def keep_bundle(self, run: str, payload: bytes) -> None:
        """Store a run's bundle under its digest.

        Raises:
            PacketForeign: `run` is no name of a run; StoreError: it cannot be written.
        """
        digest = digest_of(payload)
        FileMemory(self.folder / "bundles" / digest).write(payload)
        FileMemory(self._run(run) / "bundle").write(digest.encode())

    def adopt_bundle(self, run: str, digest: str) -> bool:
        """Whether a bundle of this digest is here, whole, from an earlier run; then it is this run's too.

        Raises:
            PacketForeign: `run` is no name of a run; StoreError: it cannot be read or written.
        """
        payload = self._bundle(digest)
        if payload is not None:
            FileMemory(self._run(run) / "bundle").write(digest.encode())
        return payload is not None

    def bundle(self, run: str) -> bytes | None:
        """Read a run's bundle; None: it is not here, or damaged.

        Raises:
            PacketForeign: `run` is no name of a run; StoreError: it cannot be read.
        """
        digest = FileMemory(self._run(run) / "bundle").read()
        return None if digest is None else self._bundle(digest.decode("ascii", "replace"))

    def _bundle(self, digest: str) -> bytes | None:
        if not _TRANSFER.fullmatch(digest):
            return None
        payload = FileMemory(self.folder / "bundles" / digest).read()
        return payload if payload is not None and digest_of(payload) == digest else None

    def want_backbone(self, run: str, digest: str) -> None:
        """A run's model has this backbone, whether it is here or not.

        Raises:
            PacketForeign: `run` is no name of a run; StoreError: it cannot be written.
        """
        if self.wanted_backbone(run) != digest:
            FileMemory(self._run(run) / "backbone").write(digest.encode())

    def wanted_backbone(self, run: str) -> str | None:
        """The digest of a run's backbone; None: it has none, as far as is known.

        Raises:
            PacketForeign: `run` is no name of a run; StoreError: it cannot be read.
        """
        digest = FileMemory(self._run(run) / "backbone").read()
        return None if digest is None else digest.decode("ascii", "replace")

    def keep_backbone(self, payload: bytes, used_by: Collection[str] = ()) -> None:
        """Store a backbone under its digest, and remove those that nothing uses any more: none of the latest
        runs (`RUNS_WITH_BACKBONES`), and none of those in `used_by`.

        Raises:
            StoreError: it cannot be written, or another not be removed.
        """
        digest = digest_of(payload)
        FileMemory(self.folder / "backbones" / digest).write(payload)
        runs = {*self.runs()[:RUNS_WITH_BACKBONES], *used_by}
        used = {digest, *(self.wanted_backbone(run) for run in runs)}
        for path in (self.folder / "backbones").glob("*"):
            if path.name not in used and _TRANSFER.fullmatch(path.name):
                remove(path)

    def backbone(self, digest: str) -> memoryview | None:
        """A backbone that is here, whole, as pages that are read when they are used; None: it is not.

        Raises:
            StoreError: it cannot be read; StoreVersion: it has a format that is not read here.
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
        """What the device can afford in this run, see `edge_agent.budget.ratio_controller`.

        Raises:
            PacketForeign: `run` is no name of a run.
        """
        return FileMemory(self._run(run) / "allowance")

    def task(self, run: str, transfer: str) -> FileMemory:
        """The task that came by this transfer.

        Raises:
            PacketForeign: `run` is no name of a run, or `transfer` is no transfer id.
        """
        if not _TRANSFER.fullmatch(transfer):
            raise PacketForeign(f"{transfer!r} is no transfer id")
        return FileMemory(self._run(run) / f"task-{transfer}")

    def keep_task(self, run: str, transfer: str, payload: bytes) -> None:
        """Store the task at hand in place of the one before.

        Raises:
            StoreError: it cannot be written.
        """
        kept = self.task(run, transfer)
        kept.write(payload)
        self.forget_tasks(run, but=kept.path)

    def has_task(self, run: str) -> bool:
        return any(self._run(run).glob("task-*"))

    def forget_tasks(self, run: str, but: Path | None = None) -> None:
        """Remove the tasks of a run, all `but` one.

        Raises:
            StoreError: one cannot be removed.
        """
        for path in self._run(run).glob("task-*"):
            if path != but:
                remove(path)

    def runs(self) -> list[str]:
        """Names of the runs with something stored, the latest first."""
        found = [path for path in (self.folder / "runs").glob("*") if path.is_dir()]
        return [path.name for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)]

    def _run(self, run: str) -> Path:
        if not _RUN.fullmatch(run):
            raise PacketForeign(f"{run!r} is no name of a run")
        return self.folder / "runs" / run
