"""The agent's state folder: whether it can be written, is in use, has room, and holds nothing damaged."""

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

COPIES = 8  # of a model, at worst: enrolment, state of three and its draft, task, reply
EXAMPLE, EXAMPLE_BYTES = "ResNet-18", 4 * 11_200_000
_TRIAL = b"\0" * 4096


def folder(store: AgentStore) -> Iterator[CheckResult]:
    """Check that the state folder, or the folder in which it would be made, can be written.

    Nothing is left behind: it might belong to another user.
    """
    what = "state folder"
    there = _nearest(store.folder)
    try:
        with tempfile.TemporaryFile(dir=there) as trial:
            trial.write(_TRIAL)
            trial.flush()
            os.fsync(trial.fileno())
    except OSError as problem:
        remedy = "give it to the agent's user (chown), free space, or choose another --state"
        yield CheckResult("fail", what, f"{there} cannot be written: {problem.strerror}", remedy)
        return
    yield CheckResult("ok", what, f"{store.folder}" + ("" if there == store.folder else " (to be made)"))


def in_use(store: AgentStore) -> Iterator[CheckResult]:
    """Check whether an agent runs with it. A lock that is not there is not made: it would belong to whoever
    asks.
    """
    if not (store.folder / state_folder.LOCK).exists():
        yield CheckResult("ok", "other agent", "none has used this state folder yet")
        return
    try:
        state_folder.lock(store.folder).close()
    except StoreInUse:
        remedy = (
            "nothing, if it is the agent you mean: it goes on; else stop it (systemctl stop fleetune-agent)"
        )
        yield CheckResult("warn", "other agent", "one is running with this state folder", remedy)
        return
    yield CheckResult("ok", "other agent", "none uses this state folder now")


def room(store: AgentStore, enrolment: Enrolment | None) -> Iterator[CheckResult]:
    """Compare the free bytes with what a run may come to."""
    free = shutil.disk_usage(_nearest(store.folder)).free
    if enrolment is None:
        name, needed = f"a run of {EXAMPLE}", COPIES * EXAMPLE_BYTES
    else:
        held = sum(path.stat().st_size for path in store.folder.rglob("*") if path.is_file())
        model_bytes = 4 * enrolment.spec.size
        name, needed = f"run {enrolment.run}", max(2 * model_bytes, COPIES * model_bytes - held)
    found = f"{_size(free)} free; {name} takes up to {_size(needed)} more"
    if free >= needed:
        yield CheckResult("ok", "disk", found)
        return
    remedy = "free some space, or put --state on a larger disk"
    yield CheckResult("warn" if enrolment is None else "fail", "disk", found, remedy)


def latest_enrolment(store: AgentStore) -> Enrolment | None:
    """The enrolment of the run joined last; None: there is none, or it cannot be read (`runs` says so)."""
    try:
        data = next(filter(None, (store.enrolment(run).read() for run in store.runs())), None)
        return None if data is None else read_enrolment(data)
    except FleetuneError:
        return None


def runs(store: AgentStore, device: str) -> Iterator[CheckResult]:
    """Check each run by reading everything that is kept of it."""
    names = store.runs()
    if not names:
        yield CheckResult("ok", "runs", "none joined yet")
    for run in names:
        try:
            yield CheckResult("ok", "runs", _kept(store, run, device))
        except PacketError as problem:
            path = store.folder / "runs" / run
            remedy = f"restore {path} from a copy, or remove it to start that run from the common model"
            yield CheckResult("fail", "runs", f"{run} is damaged: {problem}", remedy)


def _kept(store: AgentStore, run: str, device: str) -> str:
    """What there is of a run, in words.

    Raises:
        PacketError, StoreError: something of it is damaged, or cannot be read.
    """
    data = store.enrolment(run).read()
    if data is None:
        return f"{run}: no enrolment yet"
    enrolment = read_enrolment(data)
    name = str(enrolment.method.get("name"))
    what = f"{run}: {enrolment.spec.name} by {name}"
    data = store.session(run).read()
    if data is None or ":" in name:  # code of the user's is imported where its owner said --trust
        return f"{what}, {'no round done yet' if data is None else 'not looked into'}"
    method = from_section(enrolment.method, enrolment.spec)
    return f"{what}, round {read_state(data, method).round} done by {device}"


def _nearest(path: Path) -> Path:
    """`path`, or the folder in which it would be made."""
    path = path.absolute()
    return next(one for one in (path, *path.parents) if one.exists())


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"
