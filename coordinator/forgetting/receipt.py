"""The receipt for a forgotten device's owner: what was removed, and what cannot be removed."""

from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from fleetune.coordinator.fleet.fleet_folder import FleetFolder
from fleetune.protocols.errors import StoreError
from fleetune.protocols.files import locked, make_folder, write_atomically

LOCK = "lock"
REGISTRY = "registry"  # the part of a receipt that is about no run


class Remainder(Struct, frozen=True):
    """Something that stays, and why."""

    what: str
    why: str


class Receipt(Struct, frozen=True):
    """What was removed of one device.

    Attributes:
        device, name, fleet: the device's id and name, and its fleet.
        began_at: when its removal was requested, in seconds since 1970.
        finished_at: when all of it was removed; None while something is left to remove.
        removed: number of removed things by kind, for the registry and for each run by its name.
        remains: what stays, and why.
    """

    device: str
    name: str
    fleet: str
    began_at: float
    finished_at: float | None = None
    removed: Mapping[str, Mapping[str, int]] = {}
    remains: tuple[Remainder, ...] = ()

    def with_removed(self, part: str, found: Mapping[str, int]) -> "Receipt":
        """Return the receipt with what was found in one part.

        A removal that is repeated after a crash finds less than before, so the larger numbers count.
        """
        before = dict(self.removed.get(part, {}))
        most = {kind: max(number, before.get(kind, 0)) for kind, number in found.items()}
        return replace(self, removed={**self.removed, part: {**before, **most}})

    def with_remains(self, *remains: Remainder) -> "Receipt":
        """Return the receipt with further things that stay, each once."""
        return replace(self, remains=tuple(dict.fromkeys((*self.remains, *remains))))


def receipt_path(device: str, fleet: str, runs: Path) -> Path:
    return FleetFolder.of(fleet, runs).path / "receipts" / f"{device}.json"


def read_receipt(path: Path) -> Receipt | None:
    """Return a receipt; None if there is none.

    Raises:
        StoreError: the file is damaged or cannot be read.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Receipt)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as problem:
        raise StoreError(
            f"{path} cannot be read ({problem}); delete it and forget the device again"
        ) from None


def change_receipt(path: Path, change: Callable[[Receipt], Receipt]) -> Receipt:
    """Replace a receipt by what `change` returns; other processes wait meanwhile.

    Raises:
        StoreError: there is no receipt, or it cannot be read or written.
    """
    with locked(path.parent / LOCK):
        found = read_receipt(path)
        if found is None:
            raise StoreError(f"{path} is gone; forget the device again")
        changed = change(found)
        if changed != found:
            _write(path, changed)
    return changed


def begin_receipt(path: Path, new: Receipt) -> Receipt:
    """Return the unfinished receipt of an interrupted removal, or write a new one.

    A finished receipt is of a device that joined again since. It is kept under a name with a number.

    Raises:
        StoreError: it cannot be read or written.
    """
    make_folder(path.parent)
    with locked(path.parent / LOCK):
        found = read_receipt(path)
        if found is not None and found.finished_at is None:
            return found
        if found is not None and found.finished_at is not None:
            _keep(path)
        _write(path, new)
    return new


def _keep(path: Path) -> None:
    """Rename the files of a finished receipt, so that the next one of this device does not replace them."""
    free = (number for number in count(1) if not path.with_suffix(f".{number}.json").exists())
    number = next(free)
    for suffix in (".txt", ".json"):  # the file that is looked for comes last
        if (file := path.with_suffix(suffix)).exists():
            file.rename(path.with_suffix(f".{number}{suffix}"))


def _write(path: Path, receipt: Receipt) -> None:
    write_atomically(path, msgspec.json.format(msgspec.json.encode(receipt), indent=2))
