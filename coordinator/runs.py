"""A run's folder: opening a new run there, or the one that was stopped."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from coordinator.conductor import Conductor
from coordinator.enrol import enrolment_of
from coordinator.models import find_model
from coordinator.run_folder import SHARED, STATE, clear
from coordinator.run_settings import difference_words, differences, stored_settings
from coordinator.store import RunStore
from coordinator.windows import check_method
from protocols import codec
from protocols.errors import PacketError, PacketVersion, SettingError, StoreError, StoreVersion
from protocols.files import write_atomically
from protocols.method import Method
from protocols.methods import from_section
from protocols.payloads import Enrolment
from protocols.settings import RunSettings

BUNDLE = "bundle"  # its name in the store, once it is made


@dataclass(frozen=True)
class Run:
    """An open run.

    Attributes:
        folder: `runs/<name>/`.
        settings: of the run.
        enrolment: what its devices start from.
        payload: the enrolment as it is sent.
        method: made for its model.
        store: its durable state.
        conductor: its engine and method at work.
        resumed: it was stopped before and goes on.
    """

    folder: Path
    settings: RunSettings
    enrolment: Enrolment
    payload: bytes
    method: Method[Any, Any, Any, Any]
    store: RunStore
    conductor: Conductor
    resumed: bool


def open_run(
    settings: RunSettings,
    folder: Path,
    *,
    fresh: bool = False,
    durable: bool = True,
    enrolment: Enrolment | None = None,
) -> Run:
    """Open `folder` for a run: anew, or to go on with it.

    Args:
        settings: of the run.
        folder: its own.
        fresh: remove what an earlier run left there, see `run_folder.clear`.
        durable: survive a power cut; simulations do without.
        enrolment: of a new run; None: made here.

    Raises:
        SettingError: the folder holds a finished run, or one of other settings.
        ModelError, StoreError: see `prepare` and `RunStore`.
    """
    if fresh:
        clear(folder, durable=durable)
    store = RunStore.open(folder / STATE, durable=durable)
    try:
        kept = store.get("enrolment")
        payload = _begin(settings, store, enrolment) if kept is None else kept
        whole = _read_enrolment(payload, folder)
        if kept is not None:
            _check_same(settings, store, whole, folder)
        method = method_of(whole)
        conductor = Conductor(settings, whole, method, store)
    except BaseException:
        store.close()
        raise
    return Run(folder, settings, whole, payload, method, store, conductor, resumed=kept is not None)


@dataclass(frozen=True)
class Stored:
    """What a run's store says of it; read in one transaction, as it was at one moment.

    Attributes:
        settings, enrolment, payload: see `Run`.
        store: to read on in.
    """

    settings: RunSettings
    enrolment: Enrolment
    payload: bytes
    store: RunStore


@contextmanager
def stored_run(folder: Path) -> Iterator[Stored]:
    """A run's store to read in, also while a coordinator writes it.

    Raises:
        SettingError: the folder holds no run.
        StoreError: it is damaged; StoreVersion: it is from another version.
    """
    if not (folder / STATE).exists():
        raise SettingError(f"{folder} holds no run: name the folder of one, e.g. runs/demo")
    with closing(RunStore.read(folder / STATE)) as store:
        kept, payload = store.get("settings"), store.get("enrolment")
        if kept is None or payload is None:
            raise SettingError(f"{folder} holds no run that began")
        yield Stored(stored_settings(kept, folder), _read_enrolment(payload, folder), payload, store)


@contextmanager
def look_at(folder: Path) -> Iterator[Run]:
    """A run to look at as it stands now, also while a coordinator is at it; nothing goes on.

    Raises:
        SettingError, StoreError: as `stored_run`.
    """
    with stored_run(folder) as kept:
        method = method_of(kept.enrolment)
        conductor = Conductor(kept.settings, kept.enrolment, method, kept.store)
        conductor.recall()
        yield Run(
            folder, kept.settings, kept.enrolment, kept.payload, method, kept.store, conductor, resumed=True
        )


def method_of(enrolment: Enrolment) -> Method[Any, Any, Any, Any]:
    """The run's method. Raises SettingError when its settings are wrong."""
    return from_section(enrolment.method, enrolment.spec)


def mark_finished(run: Run) -> None:
    """A finished run is not gone on with."""
    with run.store.step():
        run.store.put("finished", b"1")


def save_shared_model(run: Run, path: Path | None = None) -> Path:
    """Write the coordinator's model as safetensors; its file, `models/shared.safetensors` if not given."""
    from safetensors.numpy import save

    weights = run.method.shared_model(run.conductor.state)
    tensors = {
        tensor.name: view.copy()
        for tensor, view in run.enrolment.spec.views(weights)
        if tensor.kind != "stat"
    }
    path = path or run.folder / SHARED
    write_atomically(path, save(tensors, {"model": run.enrolment.spec.name, "run": run.enrolment.run}))
    return path


def _begin(settings: RunSettings, store: RunStore, enrolment: Enrolment | None) -> bytes:
    bundle = None
    if enrolment is None:
        model = find_model(settings)
        enrolment, bundle = enrolment_of(settings, model), model.bundle
    method = method_of(enrolment)
    check_method(settings, method)
    if method.needs_validation and not settings.data.validation_fraction:
        name = settings.method["name"]
        raise SettingError(f"data.validation_fraction: {name} needs validation samples here, e.g. 0.2")
    payload = codec.encode(enrolment, enrolment.spec)
    with store.step():
        store.put("enrolment", payload)
        store.put("settings", msgspec.json.encode(settings))
        if bundle is not None:
            store.put(BUNDLE, bundle.encoded())
    return payload


def _read_enrolment(payload: bytes, folder: Path) -> Enrolment:
    try:
        return codec.decode(payload, Enrolment, None, finite=False)
    except PacketVersion as problem:
        raise StoreVersion(f"{folder}: its enrolment is from another version ({problem})") from None
    except PacketError as problem:
        raise StoreError(f"{folder}: its enrolment is damaged ({problem})") from None


def _check_same(settings: RunSettings, store: RunStore, enrolment: Enrolment, folder: Path) -> None:
    before = stored_settings(store.get("settings") or b"null", folder)
    found = differences(before, settings, enrolment.spec)
    if found:
        raise SettingError(
            f"{folder} holds a run with other settings: {difference_words(found)}; put that back to go on "
            "with it, or take another run.name (--fresh deletes the run)"
        )
    if store.get("finished") is not None:
        raise SettingError(
            f"{folder} holds a finished run: take another run.name to keep it (--fresh deletes it)"
        )
