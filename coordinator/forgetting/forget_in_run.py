"""Does the requests to forget a device that stand in a run's control file, while no process serves the run.

Each step may be interrupted and repeated. The request is withdrawn last.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from fleetune.coordinator.commands.commands import withdraw_forget
from fleetune.coordinator.commands.control_file import read_control
from fleetune.coordinator.fleet.fleet_folder import FleetFolder
from fleetune.coordinator.fleet.registry import Registry
from fleetune.coordinator.forgetting.receipt import (
    REGISTRY,
    Receipt,
    Remainder,
    begin_receipt,
    change_receipt,
    receipt_path,
)
from fleetune.coordinator.forgetting.run_files import files_that_mention, remove_from_files
from fleetune.coordinator.run.changed_settings import stored_settings
from fleetune.coordinator.run.run_controller import RunController
from fleetune.coordinator.run.stored_run import fleet_of, look_at, method_of, read_enrolment
from fleetune.coordinator.store.run_folder import STATE
from fleetune.coordinator.store.run_store import RunStore
from fleetune.protocols.errors import SettingError

SHARED_PART = Remainder(
    "the device's part in the shared model and in other devices' models",
    "an aggregate of updates cannot be taken apart; train a new run to be without it",
)


def do_requests(folder: Path, now: float) -> None:
    """Remove the devices that a run's control file names.

    Args:
        folder: the run's folder; no process serves it.
        now: seconds since 1970.

    Raises:
        StoreError: a process serves the run, or a file cannot be read or written.
        FleetuneError: the run cannot be opened, e.g. because its method is not installed here.
    """
    for device in read_control(folder).forget:
        fleet = _remove_from_store(folder, device, now)
        receipt = receipt_path(device, fleet, folder.parent)
        with look_at(folder) as run:
            files = remove_from_files(run, device)
        change_receipt(receipt, lambda one, files=files: one.with_removed(folder.name, files))  # type: ignore[misc]
        remains = [
            Remainder(
                f"{folder / name}", "Fleetune did not write it, or cannot write it anew; check it yourself"
            )
            for name in files_that_mention(folder, device)
            if not name.startswith("control.json")
        ]
        change_receipt(receipt, lambda one, remains=remains: one.with_remains(*remains))  # type: ignore[misc]
        remove_from_registry(device, fleet, folder.parent, receipt)
        withdraw_forget(folder, device)


def remove_from_registry(device: str, fleet: str, runs: Path, receipt: Path) -> None:
    """Remove a device from its fleet's registry, if there is one.

    Raises:
        StoreError: the registry or the receipt cannot be read or written.
    """
    path = FleetFolder.of(fleet, runs).registry
    if not path.exists():
        return
    with Registry.open(path) as registry:
        known = registry.device(device)
        if known is None:
            registry.compact()  # an earlier removal may have been interrupted before this
            return
        noted = Remainder(
            "serial numbers of its certificates",
            "they stay in the list of revoked certificates, without its name, until the certificates end",
        )
        remains = (noted,) if known.kind == "certificate" else ()
        change_receipt(receipt, lambda one: one.with_removed(REGISTRY, {"device": 1}).with_remains(*remains))
        registry.forget(device)
        registry.compact()


def new_receipt(device: str, name: str, fleet: str, now: float) -> Receipt:
    """Return the receipt of a removal that begins, with what Fleetune cannot reach."""
    return Receipt(
        device,
        name,
        fleet,
        now,
        remains=(
            Remainder("counters and sums that name no device", "they do not show what is the device's"),
            Remainder(
                "the system's journal, trackers, backups, and copies of reports and models",
                "Fleetune does not manage them; remove them yourself",
            ),
            Remainder(
                "addresses in a broker's log, of connections that failed before they had a name",
                "nothing says whose they are; delete the log while no coordinator runs",
            ),
            Remainder("the device's own files", "on the device: edge-agent wipe"),
            Remainder("this receipt", "delete it once the owner has it"),
        ),
    )


def _remove_from_store(folder: Path, device: str, now: float) -> str:
    """Remove a device from a run's store, and note in the receipt what was found; return the fleet's name."""
    with _opened(folder) as (store, controller, fleet):
        receipt = receipt_path(device, fleet, folder.parent)
        begin_receipt(receipt, new_receipt(device, device, fleet, now))
        with store.step():
            removed = controller.forget(device)
            # before the step is committed, so that a crash loses no number
            remains = (SHARED_PART,) if removed.keys() & {"device_round", "method"} else ()
            change_receipt(receipt, lambda one: one.with_removed(folder.name, removed).with_remains(*remains))
        store.compact()
    return fleet


@contextmanager
def _opened(folder: Path) -> Iterator[tuple[RunStore, RunController, str]]:
    """Open a run's store for writing, with its controller, as the run was left."""
    with closing(RunStore.open(folder / STATE)) as store:
        stored, payload = store.get("settings"), store.get("enrolment")
        if stored is None or payload is None:
            raise SettingError(f"{folder} holds no run that began")
        settings, enrolment = stored_settings(stored, folder), read_enrolment(payload, folder)
        controller = RunController(settings, enrolment, method_of(enrolment), store)
        controller.recall()
        yield store, controller, fleet_of(store, settings)
