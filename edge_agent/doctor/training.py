"""Checks what training needs: samples, a trainer that can be imported, and memory for it."""

import importlib.metadata
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from fleetune.edge_agent.budget.owner_policy import Policy, limits_of
from fleetune.edge_agent.budget.ratio_controller import read_ratio_controller
from fleetune.edge_agent.doctor.check_result import CheckResult
from fleetune.edge_agent.probes.memory import process_memory
from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.edge_agent.training.device_data import check_fits, check_source, split
from fleetune.edge_agent.training.onnx_sessions import OLDEST
from fleetune.edge_agent.training.trainers import AUTO, IMPORT_BYTES, KINDS, PIP, Kind, Trainers, installed
from fleetune.firmware_profiles import Board
from fleetune.protocols.conditions import Conditions
from fleetune.protocols.errors import ModelError
from fleetune.protocols.settings.section import PROCESSOR
from fleetune.protocols.wire.payloads import Enrolment

_PACKAGES: dict[Kind, tuple[str, ...]] = {
    "onnx": ("onnxruntime", "onnxruntime-gpu"),
    "torch": ("torch",),
    "ort-training": ("onnxruntime-training-cpu", "onnxruntime-training"),
}
_IMPORT_S = 120
_TRY = """
import json, sys
def resident():
    try:
        return [int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("VmRSS")][0]
    except (OSError, IndexError, ValueError):
        return None
before = resident()
module = __import__(sys.argv[1])
after = resident()
print(json.dumps([module.__version__, None if None in (before, after) else after - before]))
"""


@dataclass(frozen=True)
class Tried:
    """Result of importing a trainer in a separate process.

    Attributes:
        version: version of the package. "": it could not be imported.
        num_bytes: memory that the import added. None: unknown.
        problem: why it could not be imported.
    """

    version: str = ""
    num_bytes: int | None = None
    problem: str = ""


def data(source: str, test_fraction: float, enrolment: Enrolment | None) -> Iterator[CheckResult]:
    """Check that the samples can be loaded, suffice, and fit the run joined last.

    Raises:
        DataError: they do not.
    """
    found = check_source(source, test_fraction)
    shape, words = " x ".join(map(str, found.input_shape)), ", no labels"
    if found.y.ndim == 1:
        classes, counts = np.unique(found.y, return_counts=True)
        words = f" in {len(classes)} classes ({counts.min()} to {counts.max()} each)"
    elif found.y.shape[1]:
        words = f", labels of {found.y.shape[1]} numbers"
    text = f"{len(found.y)} samples of {shape}{words}"
    if enrolment is not None:
        check_fits(
            split(found, test_fraction, enrolment.validation_fraction), enrolment.spec, enrolment.learns
        )
        text += f"; they fit {enrolment.spec.name} of run {enrolment.run}"
    if found.y.ndim == 1 and len(classes) < 2:
        remedy = (
            "nothing if this device sees only one class; a model trained on it learns to answer that class"
        )
        yield CheckResult("warn", "data", text, remedy)
        return
    yield CheckResult("ok", "data", text)


def trainers(
    choice: str,
    usable_bytes: int | None,
    attempt: Callable[[str], Tried] | None = None,
    train_on: str = PROCESSOR,
) -> Iterator[CheckResult]:
    """Check which trainers are installed, and that the chosen one can be imported in the available memory.

    Args:
        choice: value of `--trainer`.
        usable_bytes: bytes that this process may take. None: unknown.
        attempt: imports a module. None: `try_import`.
        train_on: value of `--train-on`.
    """
    attempt = attempt or try_import
    if choice not in (AUTO, *KINDS):
        yield CheckResult(
            "fail", "trainer", f"{choice} is not a trainer", f"choose {AUTO}, {', '.join(KINDS)}"
        )
        return
    there = [kind for kind in KINDS if kind in installed()]
    for kind in there:
        yield from _quarrel(kind)
    if not there:
        remedy = f"pip install {PIP['onnx']} (or {PIP['torch']}, for models of your own)"
        yield CheckResult("fail", "trainer", "none is installed", remedy)
        return
    if choice != AUTO and choice not in there:
        yield CheckResult(
            "fail",
            "trainer",
            f"{choice} is not installed, but {', '.join(there)} is",
            f"pip install {PIP[choice]}, or leave out --trainer",
        )
        return
    used = next(kind for kind in there if choice in (AUTO, kind))
    others = [f"{kind} {_version(kind)}" for kind in there if kind != used]
    found = list(_usable(used, others, usable_bytes, attempt))
    yield from found
    if train_on != PROCESSOR and not any(one.verdict == "fail" for one in found):
        yield _computes(choice, train_on)


def _computes(choice: str, train_on: str) -> CheckResult:
    """Check if a trainer that can be imported can compute on the chosen device."""
    try:
        kind = Trainers(choice, train_on=train_on).usable[0]
    except ModelError as problem:
        return CheckResult(
            "fail", "trainer", str(problem), "leave out --train-on: the processor always works"
        )
    return CheckResult("ok", "trainer", f"{kind} computes on {train_on}")


def _usable(
    kind: Kind, others: list[str], usable_bytes: int | None, attempt: Callable[[str], Tried]
) -> Iterator[CheckResult]:
    """Check a trainer's version and its memory.

    It is imported in a separate process, because a package for another processor crashes on import.
    """
    held, needed = process_memory().resident or 0, IMPORT_BYTES[kind]
    if usable_bytes is not None and held + needed > usable_bytes:
        yield CheckResult(
            "ok",
            "trainer",
            f"{kind} {_version(kind)} is installed, but was not tried because of too little memory",
        )
        yield _too_small(kind, held, needed, usable_bytes)
        return
    tried = attempt("torch" if kind == "torch" else "onnxruntime")
    if not tried.version:
        yield CheckResult("fail", "trainer", f"{kind} is installed, but {tried.problem}", _reinstall(kind))
        return
    if kind != "torch" and _numbers(tried.version) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        found = f"onnxruntime {tried.version} is too old, at least {oldest} is needed"
        yield CheckResult("fail", "trainer", found, "pip install --upgrade onnxruntime")
        return
    beside = f" (also here: {', '.join(others)})" if others else ""
    yield CheckResult("ok", "trainer", f"{kind} {tried.version}{beside}")
    needed = needed if tried.num_bytes is None else tried.num_bytes
    if usable_bytes is None:
        remedy = "set a limit with --max-memory-mb: without one the agent cannot choose a ratio that fits"
        yield CheckResult("warn", "memory", "the memory that this process may take is unknown", remedy)
    elif held + needed > usable_bytes:
        yield _too_small(kind, held, needed, usable_bytes)
    else:
        found = (
            f"{usable_bytes / 1e6:.0f} MB are available; before any model, the agent takes"
            f" {held / 1e6:.0f} MB and "
            f"{kind} {needed / 1e6:.0f} MB"
        )
        yield CheckResult("ok", "memory", found)


def _too_small(kind: Kind, held: int, needed: int, usable_bytes: int) -> CheckResult:
    found = (
        f"{kind} needs {needed / 1e6:.0f} MB on top of the agent's {held / 1e6:.0f} MB, but this process"
        " may take "
        f"only {usable_bytes / 1e6:.0f} MB"
    )
    lighter = f"use --trainer onnx (pip install {PIP['onnx']}), " if kind == "torch" else ""
    return CheckResult(
        "fail", "memory", found, f"{lighter}stop other programs, or raise the limit (MemoryMax)"
    )


def _quarrel(kind: Kind) -> Iterator[CheckResult]:
    """Check that only one of the ONNX packages is installed. They share a folder and break each other."""
    if kind == "ort-training" and any(map(_installed_version, _PACKAGES["onnx"])):
        remedy = "pip uninstall onnxruntime onnxruntime-training-cpu, then install one of them"
        yield CheckResult(
            "fail",
            "trainer",
            "onnxruntime and its training package are both installed and overwrite each other's files",
            remedy,
        )


def _reinstall(kind: Kind) -> str:
    if kind == "torch":
        return "pip install --force-reinstall torch; on ARM boards older than a Pi 5: torch==2.9.1"
    return f"pip install --force-reinstall {PIP[kind]}"


def limit_bytes(conditions: Conditions, policy: Policy, board: Board) -> int | None:
    """Bytes that the process may take, by the board and the owner. None: no limit is known."""
    return limits_of(None, conditions, policy, board).memory_bytes


def latest_run(store: AgentStore, conditions: Conditions) -> Iterator[CheckResult]:
    """Check if the run joined last still fits: its forecast against the present memory."""
    known = ((run, read_ratio_controller(store.ratio_controller(run).read())) for run in store.runs())
    run, ratio_controller = next(((run, one) for run, one in known if one is not None), ("", None))
    if ratio_controller is None:
        yield CheckResult("skip", "forecast", "no run joined yet; after the first one see edge-agent explain")
        return
    decision = ratio_controller.decision(conditions)
    remedy = "edge-agent explain compares every ratio with its limits"
    if decision.choice is None:
        yield CheckResult("fail", "forecast", f"run {run}: {decision.reason}", remedy)
    else:
        yield CheckResult("ok", "forecast", f"run {run}: {decision.reason}")


def try_import(module: str) -> Tried:
    """Import a module in a separate process, which protects this one's memory and survives a crash."""
    command = [sys.executable, "-P", "-c", _TRY, module]
    try:
        done = subprocess.run(  # noqa: S603 - our own command line
            command,
            capture_output=True,
            timeout=_IMPORT_S,
            check=False,
            stdin=subprocess.DEVNULL,
            env={
                **os.environ,
                "ORT_DISABLE_TELEMETRY": "1",
            },  # otherwise onnxruntime leaves files in the home folder
        )
    except subprocess.TimeoutExpired:
        return Tried(problem=f"importing {module} takes longer than {_IMPORT_S} s")
    if done.returncode < 0:
        return Tried(problem=f"importing {module} ends with signal {signal.Signals(-done.returncode).name}")
    try:
        version, num_bytes = msgspec.json.decode(done.stdout.splitlines()[-1], type=tuple[str, int | None])
    except (IndexError, msgspec.MsgspecError):
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        return Tried(problem=f"importing {module} fails: {lines[-1]}")
    return Tried(version, num_bytes)


def _version(kind: Kind) -> str:
    return next(filter(None, map(_installed_version, _PACKAGES[kind])), "of unknown version")


def _installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    digits = (part for part in version.split(".")[:2])
    return tuple(int(part) for part in digits if part.isdecimal())
