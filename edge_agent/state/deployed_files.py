"""The files of what a device serves: the model in use, its versions, and the pinned one's number."""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from fleetune.edge_agent.state.agent_store import FileMemory
from fleetune.protocols.errors import StoreError
from fleetune.protocols.files import remove

MOST_VERSIONS = 5  # kept beside the pinned one: each is a whole model on disk


class _Pin(msgspec.Struct):
    version: int


@dataclass(frozen=True)
class DeployedFiles:
    """Where a device keeps its versions.

    Attributes:
        served: the model in use, a copy of its version: apps read this file alone.
        versions: folder; a file each, by number.
        pin: the version that the owner wants whatever comes.
        decisions: what was decided of late, for people.
        durable: what was written survives a power cut; simulations do without.
    """

    served: FileMemory
    versions: Path
    pin: FileMemory
    decisions: FileMemory
    durable: bool = True

    @classmethod
    def beside(cls, served: FileMemory, prefix: str = "") -> "DeployedFiles":
        """In the folder of `served`, their names beginning with `prefix`."""
        folder, durable = served.path.parent, served.durable
        pin = FileMemory(folder / f"{prefix}pin", durable=durable)
        decisions = FileMemory(folder / f"{prefix}decisions", durable=durable)
        return cls(served, folder / f"{prefix}versions", pin, decisions, durable)

    def version(self, number: int) -> FileMemory:
        """The file of a version."""
        return FileMemory(self.versions / str(number), durable=self.durable)

    @property
    def numbers(self) -> list[int]:
        """Of the versions that are here, ascending."""
        try:
            return sorted(int(path.name) for path in self.versions.iterdir() if path.name.isdecimal())
        except FileNotFoundError:
            return []
        except OSError as problem:
            raise StoreError(f"cannot read {self.versions}: {problem.strerror}") from None

    @property
    def pinned(self) -> int | None:
        """The version that the owner wants; None: the best one.

        Raises:
            StoreError: the file is damaged or cannot be read.
        """
        data = self.pin.read()
        if data is None:
            return None
        try:
            return msgspec.json.decode(data, type=_Pin).version
        except msgspec.MsgspecError:
            raise StoreError(f"{self.pin.path} is damaged; edge-agent unpin removes it") from None

    def hold(self, number: int | None) -> None:
        """Pin a version; None: none. Raises StoreError: it cannot be written."""
        if number is None:
            remove(self.pin.path, durable=self.durable)
        else:
            self.pin.write(msgspec.json.encode(_Pin(number)))

    def forget_old(self, keep: int) -> None:
        """Remove the oldest versions beyond `MOST_VERSIONS`, but not `keep` nor a pinned one.

        Raises:
            StoreError: one cannot be removed.
        """
        wanted = {keep, self.pinned}
        others = [number for number in self.numbers if number not in wanted]
        for number in others[: max(0, len(others) + 1 - MOST_VERSIONS)]:
            remove(self.version(number).path, durable=self.durable)
