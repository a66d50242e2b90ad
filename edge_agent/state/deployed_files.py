"""The files of the deployed model: the model in use, its versions, and the number of the pinned one."""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from fleetune.edge_agent.state.agent_store import FileMemory
from fleetune.protocols.errors import StoreError
from fleetune.protocols.files import remove

MOST_VERSIONS = 5  # in addition to the pinned one; few, because each is a whole model on disk


class _Pin(msgspec.Struct):
    version: int


@dataclass(frozen=True)
class DeployedFiles:
    """The files of a device's deployed model and its versions.

    Attributes:
        deployed: the deployed model, a copy of its version: apps read this file only.
        versions: folder with one file for each version, named by its number.
        pin: number of the version that the owner has pinned.
        decisions: the latest decisions, for people.
        durable: True if written files survive a power cut; simulations do without.
    """

    deployed: FileMemory
    versions: Path
    pin: FileMemory
    decisions: FileMemory
    durable: bool = True

    @classmethod
    def next_to(cls, deployed: FileMemory, prefix: str = "") -> "DeployedFiles":
        """Return the files in the folder of `deployed`, with names that begin with `prefix`."""
        folder, durable = deployed.path.parent, deployed.durable
        pin = FileMemory(folder / f"{prefix}pin", durable=durable)
        decisions = FileMemory(folder / f"{prefix}decisions", durable=durable)
        return cls(deployed, folder / f"{prefix}versions", pin, decisions, durable)

    def version(self, number: int) -> FileMemory:
        """Return the file of a version."""
        return FileMemory(self.versions / str(number), durable=self.durable)

    @property
    def numbers(self) -> list[int]:
        """Return the numbers of the stored versions, ascending."""
        try:
            return sorted(int(path.name) for path in self.versions.iterdir() if path.name.isdecimal())
        except FileNotFoundError:
            return []
        except OSError as problem:
            raise StoreError(f"cannot read {self.versions}: {problem.strerror}") from None

    @property
    def pinned(self) -> int | None:
        """Return the number of the pinned version; None if none is pinned, so that the best model is
        deployed.

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
        """Pin a version; None removes the pin. Raises StoreError if the file cannot be written."""
        if number is None:
            remove(self.pin.path, durable=self.durable)
        else:
            self.pin.write(msgspec.json.encode(_Pin(number)))

    def forget_old(self, keep: int) -> None:
        """Remove the oldest versions beyond `MOST_VERSIONS`, except `keep` and a pinned one.

        Raises:
            StoreError: a version cannot be removed.
        """
        wanted = {keep, self.pinned}
        others = [number for number in self.numbers if number not in wanted]
        for number in others[: max(0, len(others) + 1 - MOST_VERSIONS)]:
            remove(self.version(number).path, durable=self.durable)
