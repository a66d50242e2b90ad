"""The deployed model as one ONNX file for an app, replaced as a whole whenever another model is deployed.

The state folder stores the path of that file. So `edge-agent rollback` and `pin` also write it, whether the
agent runs or not. The file names its model. When the agent starts, it rewrites a file of another model. So a
power cut between deploying and publishing does no lasting harm.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from fleetune.edge_agent.extensions.adoption.deployed_model import ModelRecord, threshold_in
from fleetune.edge_agent.personal.personal_model import PersonalModel, personal_model
from fleetune.edge_agent.state.agent_store import AgentStore, FileMemory
from fleetune.protocols.errors import FleetuneError, StoreError
from fleetune.protocols.files import FileMark, write_atomically

log = logging.getLogger(__name__)


@dataclass
class Publisher:
    """Writes the deployed model to a file for an app.

    Attributes:
        store: store of the device.
        device: name of the device.
        trusted: the owner's own modules whose code a run may name.
    """

    store: AgentStore
    device: str
    trusted: tuple[str, ...] = ()
    _seen: FileMark | None = None

    @property
    def _file(self) -> FileMemory:
        return FileMemory(self.store.folder / "publish")

    @property
    def path(self) -> Path | None:
        """Path of the published file; None if the model is not published.

        Raises:
            StoreError: the stored path cannot be read.
        """
        path, _ = self._read()
        return Path(path.decode("utf-8", "surrogateescape")) if path else None

    @property
    def mode(self) -> int | None:
        """Permissions of the published file; None for the umask's. Raises StoreError."""
        _, mode = self._read()
        return int(mode, 8) if mode else None

    def publish_to(self, path: Path | None, mode: int | None = None) -> None:
        """Store a new path and new permissions for the published file; None keeps the stored value.

        Raises:
            StoreError: the choice cannot be read or written.
        """
        stored = self._read()
        where = stored[0] if path is None else str(path.absolute()).encode("utf-8", "surrogateescape")
        if mode is None and path is None:
            return
        wanted = where, stored[1] if mode is None else b"%o" % mode
        if stored != wanted:
            self._file.write(b"\0".join(wanted) if wanted[1] else wanted[0])
            self._seen = None

    def _read(self) -> tuple[bytes, bytes]:
        """Return the stored path and mode, b"" for none. A zero byte separates them, because no path contains
        one.
        """
        path, _, mode = (self._file.read() or b"").partition(b"\0")
        return path, mode

    def refresh(self) -> None:
        """Write the file if it does not hold the deployed model; log a failure in one line."""
        try:
            path, deployed = self.path, self.store.deployed.identity
            if path is None or deployed is None or deployed == self._seen:
                return
            found = personal_model(self.store, trusted=self.trusted)
            wanted = onnx_of(found, self.device)
            mode = self.mode
            if _content(path) != wanted or (mode is not None and path.stat().st_mode & 0o777 != mode):
                write_atomically(path, wanted, mode=mode)
                log.info("published %s: %s", path, found.record.words)
            self._seen = deployed
        except FleetuneError as problem:
            log.warning("the deployed model is not published: %s", problem)


def publisher_of(
    store: AgentStore, device: str, path: Path | None, trusted: tuple[str, ...], mode: int | None = None
) -> Publisher:
    """Make a publisher and write the deployed model's file.

    Args:
        store: store of the device.
        device: name of the device.
        path: path from now on; None keeps the stored one.
        trusted: see `Publisher`.
        mode: permissions from now on; None keeps the stored ones.

    Raises:
        StoreError: the path or the permissions cannot be stored.
    """
    publisher = Publisher(store, device, trusted)
    publisher.publish_to(path, mode)
    publisher.refresh()
    return publisher


def onnx_of(found: PersonalModel, device: str) -> bytes:
    """Return a personal model as an ONNX file, with its device, run, round, version and metrics."""
    from fleetune.edge_agent.personal.inference_graph import write_inference

    about = {"model": found.bundle.spec.name, "device": device, **about_record(found.record)}
    return write_inference(found.bundle, found.weights, about, found.frozen, threshold_in(found.record))


def about_record(record: ModelRecord) -> dict[str, str]:
    """Return a model's run, round, version and metrics, as far as they are known."""
    known = {
        "run": record.run,
        "round": record.round,
        "final_evaluation": record.final_evaluation,
        "version": record.version or None,
        "local_only": record.local_only or None,
        "validation_loss": record.validation_loss,
        f"{record.score or 'accuracy'}_on_own_test_samples": record.accuracy,
    }
    return {name: str(value) for name, value in known.items() if value is not None}


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise StoreError(f"cannot read {path}: {problem.strerror}") from None
