"""Provenance of a run: versions, commits, host, the user's code, processor time."""

import os
import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from fleetune.coordinator.metrics.summary import Host, Provenance
from fleetune.coordinator.run.processor_time import ProcessorTime
from fleetune.coordinator.run.stored_run import Run, stored_sources
from fleetune.protocols.version import VERSION

_PACKAGES = {"torch": "torch", "numpy": "numpy", "onnxruntime": "onnxruntime"}
_GIT_TIMEOUT_S = 5.0
_SOURCE_TREE = Path(__file__).resolve().parents[2]  # root of the checkout, if Fleetune runs from one


def provenance_of(run: Run) -> Provenance:
    """Return the provenance of a run that this process executes."""
    commits = {"folder": _commit(Path.cwd())}
    if (_SOURCE_TREE / "pyproject.toml").is_file():
        commits["fleetune"] = _commit(_SOURCE_TREE)
    return Provenance(
        versions=_versions(),
        commits={name: found for name, found in commits.items() if found},
        host=_host(),
        sources=dict(stored_sources(run.store)),
        processor_s=ProcessorTime.stored_s(run.store) or None,
    )


@cache
def _versions() -> dict[str, str]:
    found = {"fleetune": VERSION, "python": platform.python_version()}
    for name, package in _PACKAGES.items():
        try:
            found[name] = version(package)
        except PackageNotFoundError:
            continue
    return found


@cache
def _commit(folder: Path) -> str:
    """Return the git commit of a folder; "" if the folder is in no git tree, or git is missing."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


@cache
def _host() -> Host:
    return Host(platform.system(), platform.machine(), _processor(), os.cpu_count())


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model\t")))
    return next(filter(None, named), platform.processor())
