"""Checks what training needs: samples, a trainer that can be imported, and memory for it."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from msgspec import UNSET

from fleetune.edge_agent.budget.ratio_controller import read_ratio_controller
from fleetune.edge_agent.doctor.check_result import CheckResult, refused
from fleetune.edge_agent.doctor.data_trial import try_source
from fleetune.edge_agent.probes.memory import process_memory
from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.edge_agent.state.defaults import TEST_FRACTION
from fleetune.edge_agent.stream.sample_store import SampleStore
from fleetune.edge_agent.stream.sample_stream import check_stream, without_password
from fleetune.edge_agent.stream.status import status
from fleetune.edge_agent.training.device_data import check_fits, check_source, num_training_samples, split
from fleetune.edge_agent.training.onnx_providers import check_version
from fleetune.edge_agent.training.trainers import (
    IMPORT_BYTES,
    ORT_TRAINING,
    PIP,
    Trainers,
    installed_packages,
    room_problem,
)
from fleetune.protocols.conditions import Conditions
from fleetune.protocols.settings.privacy import FEW_SAMPLES
from fleetune.protocols.settings.section import PROCESSOR
from fleetune.protocols.wire.payloads import Enrolment

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
        version: version of the package; empty if the import failed.
        num_bytes: memory that the import added; None if unknown.
        problem: why the import failed.
    """

    version: str = ""
    num_bytes: int | None = None
    problem: str = ""


def data(source: str, test_fraction: float, enrolment: Enrolment | None) -> Iterator[CheckResult]:
    """Check that the samples can be loaded, suffice, and fit the run that the device joined last.

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
    validation_fraction = 0.0 if enrolment is None else enrolment.validation_fraction
    if enrolment is not None:
        parts = split(found, test_fraction, validation_fraction)
        check_fits(parts, enrolment.spec, enrolment.learns)
        text += f"; they fit {enrolment.spec.name} of run {enrolment.run}"
    if found.y.ndim == 1 and len(classes) < 2:
        remedy = (
            "if this device sees other classes, add samples of them; else the model predicts only this class"
        )
        yield CheckResult("warn", "data", text, remedy)
    else:
        yield CheckResult("ok", "data", text)
    yield from _few_samples(num_training_samples(found, test_fraction, validation_fraction), enrolment)


def _few_samples(num_train: int, enrolment: Enrolment | None) -> Iterator[CheckResult]:
    """Warn of so few training samples that an update can give them back, unless noise hides each update."""
    section = UNSET if enrolment is None else enrolment.privacy
    if num_train >= FEW_SAMPLES or (section is not UNSET and section.is_local):
        return
    yield CheckResult(
        "warn",
        "privacy",
        f"{num_train} training samples: one update of a first round can give them back to its reader",
        f'collect at least {FEW_SAMPLES}, or join runs with [privacy] and noise = "local" only',
    )


def stream(
    source: str, path: Path | None, test_fraction: float, labels: tuple[str, ...] = ("label",)
) -> Iterator[CheckResult]:
    """Check a data stream: its folder with a first file, and its sample store.

    Args:
        source: value of `--data`.
        path: folder of the sample store; None if the fleet is unknown.
        test_fraction: share of the samples that is held out for testing.
        labels: names of the label columns of tables.

    Raises:
        DataError: the folder of the stream is missing, or no sample can be read of its files.
        StoreError: the store is damaged or has another format.
    """
    check_stream(source)
    if source.startswith("watch:"):
        yield from _first_file(source, labels)
    source = without_password(source)
    if path is None or not path.exists():
        yield CheckResult("ok", "data", f"{source}: no samples stored yet; the agent stores them on arrival")
        return
    store = SampleStore.open(path)
    try:
        found = status(store, test_fraction)
    finally:
        store.close()
    train, test = (sum(getattr(row, part) for row in found.classes) for part in ("train", "test"))
    text = f"{source}: {train} training and {test} test samples stored, {found.num_bytes / 1e6:.1f} MB"
    if found.refused:
        counts = ", ".join(f"{count} {kind}" for kind, (count, _) in found.refused.items())
        remedy = "edge-agent samples lists the rejected samples with the reasons"
        yield CheckResult("warn", "data", f"{text}; rejected: {counts}", remedy)
    else:
        yield CheckResult("ok", "data", text)
    yield from _few_samples(train, None)


def _first_file(source: str, labels: tuple[str, ...]) -> Iterator[CheckResult]:
    """Read the files of a watched folder until there is a sample."""
    found = try_source(source, labels, TEST_FRACTION, seconds=0, max_samples=1)
    if found.num_samples:
        shape = " x ".join(map(str, found.shape))
        yield CheckResult("ok", "first file", f"samples of {shape}, {found.labels}")
    for kind, (count, last) in found.refused.items():
        verdict: Literal["warn", "fail"] = "warn" if found.num_samples else "fail"
        remedy = "edge-agent try shows more; the agent leaves these out and continues"
        yield CheckResult(verdict, "first file", f"refused, {kind}: {count}, last: {last}", remedy)


def trainers(
    choice: str,
    usable_bytes: int | None,
    attempt: Callable[[str], Tried] | None = None,
    train_on: str = PROCESSOR,
) -> Iterator[CheckResult]:
    """Check that the agent's trainer is installed, can be imported, fits into memory and can use its device.

    The import runs in a separate process, because a package for another processor crashes the process.

    Args:
        choice: value of `--trainer`.
        usable_bytes: bytes that this process may take; None if unknown.
        attempt: imports a module. None: `try_import`.
        train_on: value of `--train-on`.

    Raises:
        SettingError: `choice` is unknown.
        ModelError: the chosen trainer is missing or too old, or cannot compute on the device.
    """
    kind, *others = Trainers(choice).usable
    packages = installed_packages()
    if packages & ORT_TRAINING and packages & {"onnxruntime", "onnxruntime-gpu"}:
        found = "onnxruntime and onnxruntime-training are both installed and overwrite each other's files"
        remedy = "pip uninstall onnxruntime onnxruntime-training-cpu, then install one of them"
        yield CheckResult("fail", "trainer", found, remedy)
    held, needed = process_memory().resident or 0, IMPORT_BYTES[kind]
    if problem := room_problem(kind, needed, usable_bytes, held):
        yield refused("memory", problem)
        return
    tried = (attempt or try_import)("torch" if kind == "torch" else "onnxruntime")
    if not tried.version:
        arm = "; on ARM boards older than a Pi 5: torch==2.9.1" if kind == "torch" else ""
        remedy = f"pip install --force-reinstall {PIP[kind]}{arm}"
        yield CheckResult("fail", "trainer", f"{kind} is installed, but {tried.problem}", remedy)
        return
    if kind != "torch":
        check_version(tried.version)
    also = f" (also installed: {', '.join(others)})" if others else ""
    yield CheckResult("ok", "trainer", f"{kind} {tried.version}{also}")
    needed = needed if tried.num_bytes is None else tried.num_bytes
    if usable_bytes is None:
        remedy = "set a limit with --max-memory-mb; without one the agent cannot choose a ratio that fits"
        yield CheckResult("warn", "memory", "the memory that this process may take is unknown", remedy)
    elif problem := room_problem(kind, needed, usable_bytes, held):
        yield refused("memory", problem)
        return
    else:
        found = f"{usable_bytes / 1e6:.0f} MB available; without a model, the agent needs"
        found += f" {held / 1e6:.0f} MB and {kind} {needed / 1e6:.0f} MB"
        yield CheckResult("ok", "memory", found)
    if train_on != PROCESSOR:
        yield CheckResult(
            "ok", "trainer", f"{Trainers(choice, train_on=train_on).usable[0]} computes on {train_on}"
        )


def latest_run(store: AgentStore, conditions: Conditions) -> Iterator[CheckResult]:
    """Compare the forecast of the run joined last with the present memory."""
    known = ((run, read_ratio_controller(store.ratio_controller(run).read())) for run in store.runs())
    run, ratio_controller = next(((run, one) for run, one in known if one is not None), ("", None))
    if ratio_controller is None:
        found = "this device has not joined a run yet; once it has, edge-agent explain shows the forecast"
        yield CheckResult("skip", "forecast", found)
        return
    decision = ratio_controller.decision(conditions)
    found = f"run {run}: {decision.reason}"
    if decision.choice is None:
        remedy = "edge-agent explain shows each ratio with the limits that it exceeds"
        yield CheckResult("fail", "forecast", found, remedy)
    else:
        yield CheckResult("ok", "forecast", found)


def try_import(module: str) -> Tried:
    """Import a module in a separate process, which protects this one's memory and survives a crash."""
    command = [sys.executable, "-P", "-c", _TRY, module]
    quiet = {"ORT_DISABLE_TELEMETRY": "1"}  # otherwise onnxruntime leaves files in the home folder
    try:
        done = subprocess.run(  # noqa: S603 - our own command line
            command,
            capture_output=True,
            timeout=_IMPORT_S,
            check=False,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **quiet},
        )
    except subprocess.TimeoutExpired:
        return Tried(problem=f"importing {module} takes longer than {_IMPORT_S} s")
    if done.returncode < 0:
        return Tried(problem=f"importing {module} ends with signal {signal.Signals(-done.returncode).name}")
    try:
        version, num_bytes = msgspec.json.decode(done.stdout.splitlines()[-1], type=tuple[str, int | None])
    except (IndexError, msgspec.MsgspecError):
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["it printed no error"]
        return Tried(problem=f"importing {module} fails: {lines[-1]}")
    return Tried(version, num_bytes)
