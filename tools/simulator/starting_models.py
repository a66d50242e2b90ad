"""The models with which simulated devices start a run that continues another run.

The rule is that of a real fleet (`edge_agent.run.joining`). A device that took part in the earlier run, and
deployed a model of the same kind, starts with that model. Each device keeps its deployed model until a better
one replaces it.
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
    """Return the file of a simulated device's session; it exists once the device has worked."""
    return _memory(devices, name, "state")


def deployed_file(devices: Path, name: DeviceId) -> FileMemory:
    """Return the file of a simulated device's deployed model."""
    return _memory(devices, name, "deployed")


def deployed_files(devices: Path, name: DeviceId) -> DeployedFiles:
    """Return the files of the deployed model and of the versions before it."""
    return DeployedFiles.next_to(deployed_file(devices, name), f"{name}.")


def starting_model(devices: Path, name: DeviceId) -> FlatArray | None:
    """Return the model with which a device starts the run, shape (spec.size,); None for the shared model.

    Raises:
        StoreError: the file cannot be read.
        PacketError: the file is damaged.
    """
    found = read_deployed(_memory(devices, name, "begins").read())
    return None if found is None else found.weights


def carry_over(
    settings: RunSettings, enrolment: Enrolment, names: Iterable[DeviceId], devices: Path, runs: Path
) -> str:
    """Copy the devices' deployed models from the run that this run continues.

    Args:
        settings: settings of this run.
        enrolment: enrolment of this run.
        names: names of its devices.
        devices: the folder of their states.
        runs: the folder of the other run's folder.

    Returns:
        A line on the models with which the devices start; "" if this run continues no other.

    Raises:
        StoreError: a deployed model is damaged or cannot be read, or the disk is full.
    """
    # workers import this module: they start faster without the modules that can open a run
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
    """Copy one device's model from the earlier run; True if the device starts with its own model.

    `theirs` is the enrolment of the earlier run.
    """
    file, before = deployed_file(there, name), theirs.spec
    found = _read(file)
    if found is None:
        found = _in_session(state_file(there, name), theirs, method)
        if found is None:
            return False
        file = deployed_file(devices, name)
        file.write(codec.encode(found, before, own=True))
    _link(file, deployed_file(devices, name))
    took_part = found.record.run == enrolment.continues or state_file(there, name).path.exists()
    if not took_part:
        return False
    if found.record.model == enrolment.spec.hash:
        _link(file, _memory(devices, name, "begins"))
        return True
    if found.record.model != before.hash:
        return False
    carried = carry_layers(before, found.weights, enrolment.spec, enrolment.weights)
    if carried.layers:
        own = DeployedModel(replace(found.record, model=enrolment.spec.hash), carried.weights)
        _memory(devices, name, "begins").write(codec.encode(own, enrolment.spec))
    return bool(carried.layers)


def _in_session(
    memory: FileMemory, run: Enrolment, method: Method[Any, Any, Any, Any]
) -> DeployedModel | None:
    """Return the deployed model of a device that has no file of it, see `Adoption`.

    The result is None if the device has not worked, or if [adoption] is on and the device has deployed no
    model.
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


def _link(file: FileMemory, to: FileMemory) -> None:
    """Make a hard link to a file, which takes no disk space.

    This is safe because files are only replaced as a whole.
    """
    if file.path == to.path:
        return
    try:
        to.path.parent.mkdir(0o700, parents=True, exist_ok=True)
        to.path.hardlink_to(file.path)
    except OSError:  # the file system has no hard links; on a full disk the write below raises
        to.write(file.read() or b"")


def _memory(devices: Path, name: DeviceId, kind: str) -> FileMemory:
    return FileMemory(devices / f"{name}.{kind}", durable=False)
