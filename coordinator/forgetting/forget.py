"""Requests the removal of a device from all runs of its fleet, and completes it."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from fleetune.coordinator.commands.commands import Forget, with_command
from fleetune.coordinator.commands.control_file import read_control, write_control
from fleetune.coordinator.fleet.fleet_folder import FleetFolder
from fleetune.coordinator.fleet.invitations import withdrawn_lines
from fleetune.coordinator.fleet.registry import Registry
from fleetune.coordinator.forgetting.forget_in_run import do_requests, new_receipt, remove_from_registry
from fleetune.coordinator.forgetting.receipt import (
    Receipt,
    begin_receipt,
    change_receipt,
    read_receipt,
    receipt_path,
)
from fleetune.coordinator.forgetting.receipt_text import write_receipt_text
from fleetune.coordinator.forgetting.run_files import remove_from_logs
from fleetune.coordinator.run.fleets import fleets_in
from fleetune.coordinator.run.stored_run import stored_run
from fleetune.coordinator.store.folder_lock import is_claimed
from fleetune.protocols.errors import SettingError, StoreError

PATIENCE_S = 60.0  # longer than a coordinator needs to end a step and to write its store anew
MOST_FAILURES = 3
LATE_LINES_S = 1.5  # until a broker has logged that a device is disconnected
_LOOK_EVERY_S = 0.2


class Known(NamedTuple):
    """A device that a fleet knows.

    Attributes:
        device, name, fleet: its id and name, and its fleet.
        runs: folders of the fleet's runs.
    """

    device: str
    name: str
    fleet: str
    runs: tuple[Path, ...]


def forget(
    asked: str, runs: Path, fleet: str | None = None, say: Callable[[str], None] = lambda _: None
) -> tuple[Receipt, Path]:
    """Remove a device from its fleet's registry and from all runs of the fleet.

    A run that a coordinator serves is changed by that coordinator. The removal may be interrupted at any
    moment; the same command completes it, and so does the next coordinator that serves the run.

    Args:
        asked: the device's id, or its name in the registry.
        runs: the folder of runs.
        fleet: name of the fleet; needed if several fleets know the device.
        say: called with a line about invitations that were withdrawn with the device.

    Returns:
        The receipt and its file. Of a device that was forgotten before, it is the receipt of then.

    Raises:
        SettingError: no fleet knows the device, or several do.
        FleetuneError: a run cannot be changed now; the request stays and is done when the run is served next.
    """
    found = _find(asked, runs, fleet)
    if isinstance(found, Path):
        receipt = read_receipt(found)
        assert receipt is not None, "it was just found"
        write_receipt_text(found, receipt)  # an interruption may have left it out
        return receipt, found
    path = receipt_path(found.device, found.fleet, runs)
    begin_receipt(path, new_receipt(found.device, found.name, found.fleet, time.time()))
    for line in withdrawn_lines(_revoke(found, runs)):
        say(line)
    for folder in found.runs:
        write_control(folder, with_command(read_control(folder), Forget(found.device)))
    served = [folder for folder in found.runs if is_claimed(folder)]
    for folder in found.runs:
        _complete(folder, found.device)
    if served:
        time.sleep(LATE_LINES_S)
    for folder in served:
        _remove_late_lines(folder, found.device, path)
    remove_from_registry(found.device, found.fleet, runs, path)
    receipt = change_receipt(path, lambda one: replace(one, finished_at=time.time()))
    write_receipt_text(path, receipt)
    return receipt, path


def _complete(folder: Path, device: str) -> None:
    """Return when a run does not know the device any more."""
    give_up_at, failures = time.monotonic() + PATIENCE_S, 0
    while device in read_control(folder).forget:
        if not is_claimed(folder):
            try:
                do_requests(folder, time.time())
            except StoreError:  # perhaps because a coordinator was faster
                failures += 1
                if failures >= MOST_FAILURES:
                    raise
        elif time.monotonic() > give_up_at:
            raise StoreError(
                f"{folder}: its coordinator has not removed {device} within {PATIENCE_S:g} s; it will, and"
                " the same command then completes the receipt"
            )
        else:
            time.sleep(_LOOK_EVERY_S)


def _remove_late_lines(folder: Path, device: str, receipt: Path) -> None:
    """Remove what a running broker has logged of the end of the device's connection."""
    if lines := remove_from_logs(folder, device):
        part = folder.name

        def added(one: Receipt) -> Receipt:
            before = one.removed.get(part, {}).get("log_line", 0)
            return one.with_removed(part, {"log_line": before + lines})

        change_receipt(receipt, added)


def _revoke(found: Known, runs: Path) -> list[str]:
    """Let the device no longer connect, before anything of it is removed; return `Registry.revoke`."""
    path = FleetFolder.of(found.fleet, runs).registry
    if path.exists():
        with Registry.open(path) as registry:
            if registry.device(found.device) is not None:
                return registry.revoke(found.device)
    return []


def _find(asked: str, runs: Path, fleet: str | None) -> Known | Path:
    """Return the device; if no fleet knows it any more, the receipt of its removal."""
    fleets = fleets_in(runs)
    if fleet is not None and fleet not in fleets:
        raise SettingError(f"no fleet {fleet!r} in {runs}; its fleets: {', '.join(sorted(fleets)) or 'none'}")
    chosen = sorted(fleets) if fleet is None else [fleet]
    known = [one for name in chosen if (one := _known(asked, name, fleets[name], runs)) is not None]
    if len(known) > 1:
        names = ", ".join(one.fleet for one in known)
        raise SettingError(f"several fleets know {asked!r}: {names}; choose one with --fleet")
    if known:
        return known[0]
    receipts = [path for name in chosen if (path := receipt_path(asked, name, runs)).exists()]
    if len(receipts) == 1:
        return receipts[0]
    where = f"fleet {fleet}" if fleet else f"the fleets in {runs}"
    raise SettingError(f"no device {asked!r} in {where}; edge-coordinator devices lists them")


def _known(asked: str, fleet: str, folders: tuple[Path, ...], runs: Path) -> Known | None:
    device, name = asked, asked
    path = FleetFolder.of(fleet, runs).registry
    registered = False
    if path.exists():
        with Registry.open(path) as registry:
            if registry.is_known(asked):
                one = registry.find(asked)
                device, name, registered = one.id, one.name, True
    begun = read_receipt(receipt_path(device, fleet, runs))
    pending = begun is not None and begun.finished_at is None
    if registered or pending or any(_is_in_run(folder, device) for folder in folders):
        return Known(device, begun.name if pending and begun is not None else name, fleet, folders)
    return None


def _is_in_run(folder: Path, device: str) -> bool:
    if device in read_control(folder).forget:
        return True
    with stored_run(folder) as run:
        return run.store.knows(device)
