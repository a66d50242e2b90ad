"""The worker on a node: trains one device after another, with their states on the node's own disk."""

import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]
from pathlib import Path
from typing import IO, Any

from fleetune.coordinator.store.folder_lock import LOCK, claim, is_claimed
from fleetune.coordinator.store.run_folder import BACKBONE, DEVICES
from fleetune.protocols.errors import SettingError
from fleetune.tools.simulator.ray_engine import device_copies
from fleetune.tools.simulator.ray_engine.device_copies import Changes, Content
from fleetune.tools.simulator.ray_engine.direct_channel import ChannelError, ChannelListener
from fleetune.tools.simulator.ray_engine.run_package import RunPackage, versions
from fleetune.tools.simulator.workers import worker

_FOLDERS = "fleetune-node-"  # prefix of its folders for temporary files on the node


@dataclass(frozen=True)
class Answer:
    """The result of a task on a node.

    Attributes:
        result: result of the function.
        fault: the function's exception, which is raised where the task was submitted.
        changes: changes to the device's files.
    """

    result: Any = None
    fault: Any = None
    changes: Changes = field(default_factory=Changes)


class NodeWorker:
    """A Ray actor that works for one device at a time."""

    def __init__(self) -> None:
        _remove_left_behind()
        self._folder: Path | None = None
        self._lock: IO[bytes] | None = None
        self._devices = Path()
        self._awaited: ChannelListener | None = None

    def where(self) -> tuple[str, str]:
        """Return the node's name, and the folder of the run there."""
        return socket.gethostname(), str(self._folder)

    def begin(self, run: RunPackage) -> Answer:
        """Set up for a run, and remove everything of the previous run."""
        try:
            _check_versions(run.versions)
            self._devices, code = self._new_folders()
            device_copies.apply(code, Changes(run.code))
            os.chdir(code)  # user's code is imported from there
            if run.backbone is not None:
                (self._devices.parent / BACKBONE).write_bytes(run.backbone)
            worker.set_up(run.settings, run.enrolment, self._devices, run.caller_samples, run.bundle)
        except Exception as fault:  # noqa: BLE001 - raised where it was asked for
            return Answer(fault=ExceptionWithTraceback(fault, fault.__traceback__))
        return Answer()

    def listen(self) -> tuple[tuple[str, int], bytes]:
        """Open a port for a direct connection; return address and key. Raises OSError if the port cannot be
        opened.
        """
        import ray

        self._awaited = ChannelListener(ray.util.get_node_ip_address())
        return self._awaited.address, self._awaited.key

    def serve(self) -> None:
        """Do tasks from the direct connection until None arrives or the connection breaks."""
        assert self._awaited is not None, "listen() runs first"
        with suppress(ChannelError), closing(self._awaited.accept()) as channel:
            while (asked := channel.receive()) is not None:
                channel.send(self.work(*asked))

    def work(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        device: str,
        files: Mapping[str, Content] | None,
        stale: Sequence[str],
    ) -> Answer:
        """Call a function of `workers.worker` for a device.

        Args:
            function: the function.
            arguments: its arguments.
            device: name of the device.
            files: all files of the device, which replace those on this node; None if this node has the
                latest.
            stale: other devices whose files on this node are out of date.
        """
        try:
            for name in stale:
                device_copies.forget(self._devices, name)
            if files is not None:
                device_copies.replace_all(self._devices, device, files)
            before = device_copies.stamps(self._devices, device)
            result = function(*arguments)
            return Answer(result, changes=device_copies.changes(self._devices, device, before))
        except Exception as fault:  # noqa: BLE001 - raised where it was asked for
            return Answer(fault=ExceptionWithTraceback(fault, fault.__traceback__))

    def leave(self) -> None:
        """End the run and remove its files from this node."""
        os.chdir(tempfile.gettempdir())
        if self._folder is not None and self._lock is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._lock.close()
        self._folder = self._lock = None

    def _new_folders(self) -> tuple[Path, Path]:
        """Make the folders of the devices' states and of the user's code."""
        self.leave()
        self._folder = Path(tempfile.mkdtemp(prefix=_FOLDERS))
        self._lock = claim(self._folder)
        devices, code = self._folder / "run" / DEVICES, self._folder / "code"
        for folder in (devices, code):
            folder.mkdir(parents=True)
        return devices, code


def _check_versions(theirs: Mapping[str, str]) -> None:
    for package, here in versions().items():
        if theirs[package] != here:
            raise SettingError(
                f"node {socket.gethostname()} has {package} {here}, and this machine {theirs[package]}:"
                " results would differ; install the same there"
            )


def _remove_left_behind() -> None:
    """Remove the folders of workers that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDERS}*"):
        if (folder / LOCK).exists() and not is_claimed(folder):
            shutil.rmtree(folder, ignore_errors=True)
