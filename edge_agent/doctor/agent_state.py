"""Checks the agent's state folder: write access, another agent that uses it, free space, damaged files."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fleetune.edge_agent.doctor.check_result import CheckResult
from fleetune.edge_agent.extensions.session_state import read_state
from fleetune.edge_agent.state import state_folder
from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.protocols.errors import FleetuneError, PacketError, StoreInUse
from fleetune.protocols.methods import from_section
from fleetune.protocols.wire.payloads import Enrolment, read_enrolment

COPIES = 8  # copies of a model in the worst case: enrolment, three states and a draft, task, reply
EXAMPLE, EXAMPLE_BYTES = "ResNet-18", 4 * 11_200_000
_TRIAL = b"\0" * 4096


def folder(store: AgentStore) -> Iterator[CheckResult]:
    """Check that the state folder can be written; if it is missing, the folder in which it would be created.

    The check creates no folder, because the folder would belong to the user of this command.
    """
    what = "state folder"
    there = _nearest(store.folder)
    try:
        with tempfile.TemporaryFile(dir=there) as trial:
            trial.write(_TRIAL)
            trial.flush()
            os.fsync(trial.fileno())
    except OSError as problem:
        remedy = "let the agent's user write there (chown), free some space, or choose another --state"
        yield CheckResult("fail", what, f"{there} cannot be written: {problem.strerror}", remedy)
        return
    is_new = there != store.folder.absolute()
    yield CheckResult("ok", what, f"{store.folder}{' (will be created)' if is_new else ''}")


def in_use(store: AgentStore) -> Iterator[CheckResult]:
    """Check that no other agent runs with this state folder.

    The check creates no lock file, because the file would belong to the user of this command.
    """
    if not (store.folder / state_folder.LOCK).exists():
        yield CheckResult("ok", "other agent", "no agent has used this state folder yet")
        return
    try:
        state_folder.lock(store.folder).close()
    except StoreInUse:
        remedy = "stop it if it should not run (systemctl stop fleetune-agent)"
        yield CheckResult("warn", "other agent", "an agent runs with this state folder", remedy)
        return
    yield CheckResult("ok", "other agent", "no agent uses this state folder now")


def room(store: AgentStore, enrolment: Enrolment | None) -> Iterator[CheckResult]:
    """Compare the free space of the disk with the bytes that a run may need."""
    free = shutil.disk_usage(_nearest(store.folder)).free
    if enrolment is None:
        name, needed = f"a run of {EXAMPLE}", COPIES * EXAMPLE_BYTES
    else:
        held = sum(path.stat().st_size for path in store.folder.rglob("*") if path.is_file())
        model_bytes = 4 * enrolment.spec.size
        name, needed = f"run {enrolment.run}", max(2 * model_bytes, COPIES * model_bytes - held)
    found = f"{_size(free)} free; {name} needs up to {_size(needed)} more"
    if free >= needed:
        yield CheckResult("ok", "disk", found)
        return
    remedy = "free some space, or put --state on a larger disk"
    yield CheckResult("warn" if enrolment is None else "fail", "disk", found, remedy)


def latest_enrolment(store: AgentStore) -> Enrolment | None:
    """Enrolment of the run that the device joined last; None if it is missing or damaged (see `runs`)."""
    try:
        data = next(filter(None, (store.enrolment(run).read() for run in store.runs())), None)
        return None if data is None else read_enrolment(data)
    except FleetuneError:
        return None


def runs(store: AgentStore, device: str) -> Iterator[CheckResult]:
    """Check each run by reading all files that the agent stored for it."""
    names = store.runs()
    if not names:
        yield CheckResult("ok", "runs", "this device has not joined a run yet")
    for run in names:
        try:
            yield CheckResult("ok", "runs", _stored_state(store, run, device))
        except PacketError as problem:
            path = store.folder / "runs" / run
            remedy = f"restore {path} from a copy, or remove it to start that run from the common model"
            yield CheckResult("fail", "runs", f"{run} is damaged: {problem}", remedy)


def _stored_state(store: AgentStore, run: str, device: str) -> str:
    """Text that describes the stored state of a run.

    Raises:
        PacketError, StoreError: a part of it is damaged or cannot be read.
    """
    data = store.enrolment(run).read()
    if data is None:
        return f"{run}: the run's description has not arrived yet"
    enrolment = read_enrolment(data)
    name = str(enrolment.method.get("name"))
    what = f"{run}: model {enrolment.spec.name}, method {name}"
    data = store.session(run).read()
    if data is None or ":" in name:  # a user's code is imported only if its owner named it with --trust
        return f"{what}, {'no round finished yet' if data is None else 'state not checked'}"
    method = from_section(enrolment.method, enrolment.spec)
    return f"{what}, {device} has finished round {read_state(data, method).round}"


def _nearest(path: Path) -> Path:
    """`path`, or the nearest existing folder above it."""
    path = path.absolute()
    return next(one for one in (path, *path.parents) if one.exists())


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"
