"""Opens a run's folder: for a new run, or to continue one that was stopped or whose rounds were raised.

Everything that can fail at the start of a run is tried before anything is written or removed. A run that no
device has joined has nothing to lose: it starts again when its settings have changed.
"""

import dataclasses
import logging
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import cast

import msgspec
from msgspec.structs import replace

from fleetune.coordinator.combine.rules import check_rule
from fleetune.coordinator.extensions.privacy.checks import check_privacy
from fleetune.coordinator.rounds.policies.semi_asynchronous import check_method
from fleetune.coordinator.run.changed_settings import (
    Differences,
    check_changes,
    difference_words,
    differences,
    going_on,
    is_raised,
    stored_settings,
)
from fleetune.coordinator.run.enrolment import Beginning, beginning_of
from fleetune.coordinator.run.few_groups import few_groups_line
from fleetune.coordinator.run.models import Model, find_model
from fleetune.coordinator.run.processor_time import ProcessorTime
from fleetune.coordinator.run.run_controller import RunController
from fleetune.coordinator.run.stored_run import (
    BUNDLE,
    FINISHED,
    SOURCES,
    Run,
    edited_sources,
    method_of,
    read_enrolment,
)
from fleetune.coordinator.store.run_folder import BACKBONE, STATE, clear
from fleetune.coordinator.store.run_store import RunStore
from fleetune.coordinator.store.stored_backbone import backbone_payload
from fleetune.protocols.errors import SettingError
from fleetune.protocols.files import write_atomically
from fleetune.protocols.model.spec import Backbone
from fleetune.protocols.pages_on_disk import array_on_disk, bytes_on_disk
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.user_sources import user_sources
from fleetune.protocols.update import codec
from fleetune.protocols.wire.transfer import Payload

log = logging.getLogger(__name__)


def open_run(
    settings: RunSettings,
    folder: Path,
    *,
    fresh: bool = False,
    durable: bool = True,
    in_process: bool = False,
    beginning: Beginning | None = None,
    find: Callable[[RunSettings], Model] = find_model,
) -> Run:
    """Open `folder` for a new run, or to continue the run in it.

    A run continues if the settings have the same meaning, or differ only where changes are allowed (see
    `coordinator.run.changed_settings`). A finished run continues if its number of rounds was raised.

    Args:
        settings: settings of the run.
        folder: the run's own folder.
        fresh: True to remove the files of an earlier run, see `run_folder.clear`.
        durable: True to survive a power cut; simulations use False.
        in_process: True if the devices run in this process, see `RunController`.
        beginning: enrolment of a new run, with its files; None to make it here.
        find: function that finds the model of a new run.

    Raises:
        SettingError: the folder holds a finished run, or a run with other settings or other user code.
        ModelError, StoreError: see `prepare` and `RunStore`.
    """
    is_there = (folder / STATE).exists() and not fresh
    new = None if is_there else _prepare(settings, beginning, folder.parent, find)
    if fresh:
        clear(folder, durable=durable)
    with ExitStack() as opened:
        store = opened.enter_context(closing(RunStore.open(folder / STATE, durable=durable)))
        payload = store.get("enrolment")
        run = None if payload is None else _go_on(settings, folder, store, payload, in_process=in_process)
        if run is None:
            new = new or _prepare(settings, beginning, folder.parent, find)
            run = _begin(folder, store, *new, durable=durable, in_process=in_process)
        opened.pop_all()
    return run


def _prepare(
    settings: RunSettings, beginning: Beginning | None, runs: Path, find: Callable[[RunSettings], Model]
) -> tuple[RunSettings, Beginning]:
    """Return the settings of a new run, in agreement with its enrolment, and its start."""
    if beginning is None:
        model = find(settings)
        beginning = beginning_of(settings, model, runs)
        if model.bundle is not None:
            made = model.bundle.for_devices(beginning.enrolment.spec).encoded()
            beginning = Beginning(beginning.enrolment, beginning.backbone, made)
    enrolment = beginning.enrolment
    method = method_of(enrolment)
    check_method(settings, method)
    check_rule(settings, method)
    check_privacy(settings, method)
    if method.needs_validation and not settings.data.validation_fraction:
        name = settings.method["name"]
        raise SettingError(f"data.validation_fraction: {name} needs validation samples here, e.g. 0.2")
    if settings.adoption.canary and not method.serves_shared_model:
        raise SettingError(
            f"adoption.canary: {settings.method['name']} has no shared model that devices serve as it is;"
            " leave it out, or choose a method such as fedavg"
        )
    return replace(settings, method=enrolment.method, training=enrolment.training), beginning


def _begin(
    folder: Path,
    store: RunStore,
    settings: RunSettings,
    new: Beginning,
    *,
    durable: bool,
    in_process: bool,
) -> Run:
    payload = codec.encode(new.enrolment, new.enrolment.spec)
    if new.backbone is not None:
        write_atomically(folder / BACKBONE, new.backbone, durable=durable)
    with store.step():
        store.clear()
        store.put("enrolment", payload)
        store.put("settings", msgspec.json.encode(settings))
        store.put(SOURCES, msgspec.json.encode(user_sources(settings)))
        if new.bundle is not None:
            store.put(BUNDLE, new.bundle)
    if line := few_groups_line(settings.method, new.enrolment.spec):
        log.warning("%s", line)
    return _run(settings, folder, store, payload, resumed=False, in_process=in_process)


def _go_on(
    settings: RunSettings, folder: Path, store: RunStore, payload: bytes, *, in_process: bool
) -> Run | None:
    """Continue the run in the store; None if no device has joined it and its settings have changed.

    Raises:
        SettingError: the run is finished, or its settings differ.
        StoreError: the store is damaged.
        StoreVersion: this version cannot read the store's format.
    """
    enrolment = read_enrolment(payload, folder)
    before = stored_settings(store.get("settings") or b"null", folder)
    settings = going_on(before, settings)
    found, edited = differences(before, settings, enrolment.spec), edited_sources(store, settings)
    check_privacy(settings, method_of(enrolment))
    if (found or edited) and store.get("engine") is None:
        words = "; ".join(filter(None, (difference_words(found), edited)))
        log.warning("%s: the run starts again, because no device had joined it: %s", folder, words)
        return None
    if edited:
        raise SettingError(
            f"{folder} was begun with other code: {edited}; put that back to go on with the run, or set "
            "another run.name (--fresh deletes the run)"
        )
    if isinstance(enrolment.spec.backbone, Backbone):
        backbone_payload(folder, enrolment.spec)
    run = _run(settings, folder, store, payload, resumed=True, in_process=in_process)
    raised = is_raised(before, settings)
    if store.get(FINISHED) is not None and not raised:
        raise SettingError(
            f"{folder} holds a finished run: raise run.rounds to go on with it, or set another run.name "
            "(--fresh deletes the run)"
        )
    if found:
        _change(run, found, raised=raised)
    return run


def _change(run: Run, found: Differences, *, raised: bool) -> None:
    """Continue with changed settings.

    Raises:
        SettingError: a changed setting must not change.
    """
    run.controller.recall()
    check_changes(found, run.controller.engine_state.rounds_done, run.folder)
    check_rule(run.settings, run.method)
    with run.store.step():
        run.store.put("settings", msgspec.json.encode(run.settings))
        if raised:
            run.store.drop(FINISHED)
            if run.controller.engine_state.stage in ("evaluating", "finished"):
                run.controller.reopen()
    log.warning("%s: %s", run.folder, difference_words(found))


def _run(
    settings: RunSettings, folder: Path, store: RunStore, payload: bytes, *, resumed: bool, in_process: bool
) -> Run:
    enrolment, sent = read_enrolment(payload, folder), cast("Payload", payload)
    if not in_process:  # both are read seldom
        enrolment = dataclasses.replace(enrolment, weights=array_on_disk(enrolment.weights, folder))
        sent = bytes_on_disk(payload, folder)
    method = method_of(enrolment)
    controller = RunController(settings, enrolment, method, store, in_process=in_process)
    processor = ProcessorTime(store)
    return Run(
        folder, settings, enrolment, sent, method, store, controller, resumed=resumed, processor=processor
    )
