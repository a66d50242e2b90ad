"""A run in its folder: its parts, reading it, and its final files."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fleetune.coordinator.run.changed_settings import stored_settings
from fleetune.coordinator.run.processor_time import ProcessorTime
from fleetune.coordinator.run.run_controller import RunController
from fleetune.coordinator.store.run_folder import SHARED, STATE
from fleetune.coordinator.store.run_store import RunStore
from fleetune.coordinator.store.stored_backbone import stored_backbone
from fleetune.protocols.errors import PacketError, PacketVersion, SettingError, StoreError, StoreVersion
from fleetune.protocols.files import write_atomically
from fleetune.protocols.method.method import Method
from fleetune.protocols.methods import from_section
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.user_sources import Sources, changed, user_sources
from fleetune.protocols.update import codec
from fleetune.protocols.wire.payloads import Enrolment
from fleetune.protocols.wire.transfer import Payload

# names in the store, written once the bundle is made and once the run is over
BUNDLE, FINISHED = "bundle", "finished"
FLEET = "fleet"  # name in the store of the fleet that was served last
SOURCES = "sources"  # name in the store of `user_sources` at the start of the run


@dataclass(frozen=True)
class Run:
    """An open run.

    Attributes:
        folder: `runs/<name>/`.
        settings: settings of the run.
        enrolment: initial data of its devices.
        payload: the encoded enrolment, as it is sent.
        method: the method, made for the run's model.
        store: durable state of the run.
        controller: the run controller.
        resumed: True if the run was stopped before and continues.
        processor: processor time that the run takes on this machine.
    """

    folder: Path
    settings: RunSettings
    enrolment: Enrolment
    payload: Payload
    method: Method[Any, Any, Any, Any]
    store: RunStore
    controller: RunController
    resumed: bool
    processor: ProcessorTime


@dataclass(frozen=True)
class Stored:
    """Content of a run's store, read in one transaction.

    Attributes:
        settings, enrolment, payload: see `Run`.
        store: the open store, for further reads.
    """

    settings: RunSettings
    enrolment: Enrolment
    payload: bytes
    store: RunStore


@contextmanager
def stored_run(folder: Path) -> Iterator[Stored]:
    """Open a run's store for reading, also while a coordinator writes it.

    Raises:
        SettingError: the folder holds no run.
        StoreError: the store is damaged; StoreVersion: this version cannot read its format.
    """
    if not (folder / STATE).exists():
        raise SettingError(f"{folder} holds no run: name the folder of one, e.g. runs/demo")
    with closing(RunStore.read(folder / STATE)) as store:
        stored, payload = store.get("settings"), store.get("enrolment")
        if stored is None or payload is None:
            raise SettingError(f"{folder} holds no run that began")
        yield Stored(stored_settings(stored, folder), read_enrolment(payload, folder), payload, store)


def fleet_of(store: RunStore, settings: RunSettings) -> str:
    """Return the name of the fleet that trains a run."""
    served = store.get(FLEET)
    return settings.run.fleet or settings.run.name if served is None else served.decode()


def note_fleet(store: RunStore, fleet: str) -> None:
    """Store the name of the fleet that is served. Raises StoreError."""
    if store.get(FLEET) != fleet.encode():
        with store.step():
            store.put(FLEET, fleet.encode())


@contextmanager
def look_at(folder: Path) -> Iterator[Run]:
    """Open a run read-only in its present state, also while a coordinator works on it.

    Raises:
        SettingError, StoreError: as `stored_run`.
    """
    with stored_run(folder) as stored:
        method = method_of(stored.enrolment)
        controller = RunController(stored.settings, stored.enrolment, method, stored.store)
        controller.recall()
        yield Run(
            folder,
            stored.settings,
            stored.enrolment,
            stored.payload,
            method,
            stored.store,
            controller,
            resumed=True,
            processor=ProcessorTime(stored.store),
        )


def method_of(enrolment: Enrolment) -> Method[Any, Any, Any, Any]:
    """Return the run's method. Raises SettingError if its settings are wrong, or it does not fit the run's
    task.
    """
    return from_section(enrolment.method, enrolment.spec, enrolment.learns.kind)


def stored_sources(store: RunStore) -> Sources:
    """Return `user_sources` of a run as stored when it began."""
    data = store.get(SOURCES)
    return {} if data is None else msgspec.json.decode(data, type=dict[str, str])


def edited_sources(store: RunStore, settings: RunSettings) -> str:
    """Return the names of the user's source files that changed since the run began, as text.

    "" if none did.
    """
    return changed(stored_sources(store), user_sources(settings))


def mark_finished(run: Run) -> None:
    """Mark the run as finished, so that it is not continued."""
    with run.store.step():
        run.store.put(FINISHED, b"1")


def save_shared_model(run: Run, path: Path | None = None) -> Path:
    """Write the coordinator's model as safetensors, with running statistics and frozen tensors.

    Returns the file: `path`, or `models/shared.safetensors` in the run's folder if not given.
    """
    from safetensors.numpy import save

    weights = run.controller.shared_model
    tensors = {tensor.name: view.copy() for tensor, view in run.enrolment.spec.views(weights)}
    tensors |= stored_backbone(run.folder, run.enrolment.spec)
    data = save(tensors, {"model": run.enrolment.spec.name, "run": run.enrolment.run})
    if path is None:
        path = run.folder / SHARED
        write_atomically(path, data)
    else:
        write_atomically(path, data, mode=None)
    return path


def read_enrolment(payload: bytes, folder: Path) -> Enrolment:
    """Decode the enrolment in a run's store.

    Raises:
        StoreError: the enrolment is damaged.
        StoreVersion: another version of Fleetune wrote it.
    """
    try:
        return codec.decode(payload, Enrolment, None, finite=False)
    except PacketVersion as problem:
        raise StoreVersion(f"the enrolment in {folder}: {problem}") from None
    except PacketError as problem:
        raise StoreError(f"{folder}: its enrolment is damaged ({problem})") from None
