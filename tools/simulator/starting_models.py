"""What simulated devices bring into a run that goes on from another: the models that they serve there.

The rule is a fleet's (`edge_agent.run.joining`): who took part in that run, and serves a model of this very
kind, begins with it; everybody goes on serving what it served until there is something better.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import UNSET

from fleetune.coordinator.store.run_folder import DEVICES
from fleetune.edge_agent.extensions.adoption.adoption import Adoption
from fleetune.edge_agent.extensions.adoption.deployed_model import DeployedModel, read_deployed
from fleetune.edge_agent.extensions.session_state import recall
from fleetune.edge_agent.state.agent_store import FileMemory
from fleetune.edge_agent.state.deployed_files import DeployedFiles
from fleetune.protocols.errors import PacketError, StoreError
from fleetune.protocols.method.method import DeviceId, Method
from fleetune.protocols.methods import from_section
from fleetune.protocols.model.carried_layers import carry_over as carry_layers
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.update import codec
from fleetune.protocols.wire.payloads import Enrolment


def state_file(devices: Path, name: DeviceId) -> FileMemory:
    """A simulated device's session; it is there once the device has worked."""
    return _memory(devices, name, "state")


def deployed_file(devices: Path, name: DeviceId) -> FileMemory:
    """The model that it serves."""
    return _memory(devices, name, "served")


def deployed_files(devices: Path, name: DeviceId) -> DeployedFiles:
    """It, and the versions before it."""
    return DeployedFiles.next_to(deployed_file(devices, name), f"{name}.")


def starting_model(devices: Path, name: DeviceId) -> FlatArray | None:
    """The model that it begins the run with, shape (spec.size,); None: the common one.

    Raises:
        StoreError: it cannot be read; PacketError: it is damaged.
    """
    found = read_deployed(_memory(devices, name, "begins").read())
    return None if found is None else found.weights


def carry_over(
    settings: RunSettings, enrolment: Enrolment, names: Iterable[DeviceId], devices: Path, runs: Path
) -> str:
    """Hand on what the devices serve after the run that this one goes on from.

    Args:
        settings: of this run.
        enrolment: of this run.
        names: of its devices.
        devices: the folder of their states.
        runs: the folder that the other run is in.

    Returns:
        What the devices begin with, in one line; "": this run goes on from no other.

    Raises:
        StoreError: a served model is damaged or cannot be read, or the disk is full.
    """
    # Workers, which read what a device begins with, start sooner without all that can open a run.
    from fleetune.coordinator.run.starting_weights import run_named
    from fleetune.coordinator.run.stored_run import stored_run

    before = run_named(settings)
    if before is None:
        return ""
    there, names = runs / before / DEVICES, list(names)
    with stored_run(runs / before) as run:
        theirs = run.enrolment
    method = from_section(theirs.method, theirs.spec)
    own = sum(_carry_over_one(name, enrolment, theirs, method, there, devices) for name in names)
    if not own:
        return f"all devices begin with the shared model of run {before}: {there} has no models of their own"
    others = "" if own == len(names) else ", the others with its shared model"
    return f"{own} of {len(names)} devices begin with their own models from run {before}{others}"


def _carry_over_one(
    name: DeviceId,
    enrolment: Enrolment,
    theirs: Enrolment,
    method: Method[Any, Any, Any, Any],
    there: Path,
    devices: Path,
) -> bool:
    """Whether the device begins with its own model; `theirs`: of the run that this one goes on from."""
    kept, before = deployed_file(there, name), theirs.spec
    found = _read(kept)
    if found is None:
        found = _in_session(state_file(there, name), theirs, method)
        if found is None:
            return False
        kept = deployed_file(devices, name)
        kept.write(codec.encode(found, before, own=True))
    _link(kept, deployed_file(devices, name))
    took_part = found.record.run == enrolment.continues or state_file(there, name).path.exists()
    if not took_part:
        return False
    if found.record.model == enrolment.spec.hash:
        _link(kept, _memory(devices, name, "begins"))
        return True
    if found.record.model != before.hash:
        return False
    carried = carry_layers(before, found.weights, enrolment.spec, enrolment.weights)
    if carried.kept:
        own = DeployedModel(replace(found.record, model=enrolment.spec.hash), carried.weights)
        _memory(devices, name, "begins").write(codec.encode(own, enrolment.spec))
    return bool(carried.kept)


def _in_session(
    memory: FileMemory, run: Enrolment, method: Method[Any, Any, Any, Any]
) -> DeployedModel | None:
    """What a device serves that has no file of it, see `Adoption`; None: it has not worked, or [adoption]
    lets it serve nothing.
    """
    try:
        if run.adoption is not UNSET or memory.read() is None:
            return None
        found = recall(run, method, memory)
    except PacketError as problem:
        raise _damaged(memory, problem) from None
    best = found.slots.get(Adoption.name)
    return None if best is None else DeployedModel(best, method.personal_model(found.state))


def _read(memory: FileMemory) -> DeployedModel | None:
    try:
        return read_deployed(memory.read())
    except PacketError as problem:
        raise _damaged(memory, problem) from None


def _damaged(memory: FileMemory, problem: PacketError) -> StoreError:
    return StoreError(
        f"{memory.path}, the model that a device begins with, is damaged ({problem});"
        " simulate that run anew, or remove the file to begin with the shared model"
    )


def _link(kept: FileMemory, to: FileMemory) -> None:
    """One file under two names, which costs no disk: both are only ever replaced whole."""
    if kept.path == to.path:
        return
    try:
        to.path.parent.mkdir(0o700, parents=True, exist_ok=True)
        to.path.hardlink_to(kept.path)
    except OSError:  # a file system without links, or full: then writing says so
        to.write(kept.read() or b"")


def _memory(devices: Path, name: DeviceId, kind: str) -> FileMemory:
    return FileMemory(devices / f"{name}.{kind}", durable=False)
