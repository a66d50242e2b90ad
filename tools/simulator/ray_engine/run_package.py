"""The data of a run that a node needs, sent once, so that nodes need no access to this machine's files."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from fleetune.coordinator.store.run_folder import BACKBONE
from fleetune.protocols.errors import SettingError
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.tools.simulator.caller_samples import CallerSamples

SAME_BITS = ("fleetune", "torch", "onnxruntime", "numpy", "ray")  # packages whose versions may change results
_MOST_CODE_BYTES = 2**24
_USER_CODE = re.compile(r"(?:^|:)([A-Za-z_]\w*)(?:\.\w+)*:[A-Za-z_]\w*$")


@dataclass(frozen=True)
class RunPackage:
    """A run's settings, samples, code and other data, as workers on a node need them.

    Attributes:
        settings: settings of the run.
        enrolment: payload of the enrolment.
        caller_samples: the caller's samples and their assignment, if any.
        backbone: the file of the model's frozen part; None if nothing is frozen.
        bundle: bundle from which the model is trained; None if torch trains.
        code: the user's own Python files, by their path below the current folder.
        versions: versions of the packages `SAME_BITS`.
    """

    settings: RunSettings
    enrolment: bytes
    caller_samples: CallerSamples
    backbone: bytes | None
    bundle: bytes | None
    code: Mapping[str, bytes]
    versions: Mapping[str, str]


def pack_run(
    settings: RunSettings,
    enrolment: bytes,
    devices: Path,
    caller_samples: CallerSamples,
    bundle: bytes | None,
) -> RunPackage:
    """Return the data that `worker.set_up` needs, without paths of this machine.

    Args:
        settings: settings of the run.
        enrolment: payload of the enrolment.
        devices: the folder of the devices' states.
        caller_samples: samples that the caller passed.
        bundle: bundle from which the model is trained; None if torch trains.

    Raises:
        DataError: the run's samples cannot be read.
        SettingError: the user's own code is too large to send.
    """
    frozen = devices.parent / BACKBONE
    return RunPackage(
        settings,
        enrolment,
        CallerSamples(caller_samples.samples(settings), caller_samples.assigned),
        frozen.read_bytes() if frozen.exists() else None,
        bundle,
        user_code_of(settings, Path.cwd()),
        versions(),
    )


def versions() -> dict[str, str]:
    """Return the installed versions of the packages `SAME_BITS`."""
    return {name: _version(name) for name in SAME_BITS}


def user_code_of(settings: RunSettings, folder: Path) -> dict[str, bytes]:
    """Return the Python files of a folder and its packages, by path, if the settings name a module in it.

    Raises:
        SettingError: the files are too large for code.
    """
    named = {name for text in _texts(msgspec.to_builtins(settings)) for name in _USER_CODE.findall(text)}
    there = {name for name in named if (folder / f"{name}.py").exists() or (folder / name).is_dir()}
    if not there:
        return {}
    files = [*folder.glob("*.py"), *folder.glob("*/__init__.py")]
    packages = {path.parent for path in files if path.name == "__init__.py"} | {
        folder / name for name in there
    }
    files += [path for package in packages - {folder} for path in package.rglob("*.py")]
    if (size := sum(path.stat().st_size for path in set(files))) > _MOST_CODE_BYTES:
        raise SettingError(
            f"{folder}: {size / 2**20:.0f} MiB of Python files next to {min(there)} are too much to send"
            " to the nodes; give the run a folder of its own"
        )
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(set(files))}


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
