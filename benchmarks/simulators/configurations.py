"""Configurations of the simulators, and the environments that they need."""

import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rival_environments import python_in
from fleetune.tools.simulator.engine import WORKERS_A_CARD

_TORCH = "torch==2.13.0"  # the same version for all simulators, as in the Makefile
# The part of APPFL's requirements that its simulator imports; pip does not finish with all of them.
_FOR_APPFL = (
    "colorama",
    "lz4",
    "matplotlib",
    "omegaconf",
    "opacus",
    "pandas",
    "scikit-learn",
    "seaborn",
    "wandb",
)


@dataclass(frozen=True)
class Configuration:
    """A simulator with its options.

    Attributes:
        name: shown in tables.
        script: file name in `scripts`.
        processes: number of training processes.
        packages: installed by pip into its own environment; empty: it uses this environment.
        bare: packages installed without their requirements.
        by_torchrun: whether torchrun starts one copy for each process.
        arguments: further arguments of its script.
    """

    name: str
    script: str
    processes: int = 1
    packages: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()
    by_torchrun: bool = False
    arguments: tuple[str, ...] = ()


def configurations(cores: int, device: str = "cpu") -> dict[str, Configuration]:
    """Configurations for a device, by name; on processors with one process and with one for each core."""
    pfl, flwr = ("pfl==0.6.0",), ("flwr[simulation]==1.41.0",)
    on_processors = [
        Configuration("fleetune", "run_fleetune.py", cores),
        Configuration("fleetune-1", "run_fleetune.py", 1),
        Configuration("fleetune-onnx", "run_fleetune.py", cores, arguments=("onnx",)),
        Configuration("fleetune-bfloat16", "run_fleetune.py", cores, arguments=("torch", "bfloat16")),
        Configuration("bare", "run_bare.py"),
        Configuration("pfl", "run_pfl.py", 1, pfl),
        Configuration("pfl-all", "run_pfl.py", cores, pfl, by_torchrun=True),
        Configuration("flwr", "run_flwr.py", cores, flwr),
        Configuration("appfl", "run_appfl.py", 1, _FOR_APPFL, bare=("appfl==1.12.0",)),
    ]
    a_few = min(cores, WORKERS_A_CARD)
    on_a_card = [
        Configuration("fleetune", "run_fleetune.py", a_few),
        Configuration("fleetune-1", "run_fleetune.py", 1),
        Configuration("fleetune-bfloat16", "run_fleetune.py", a_few, arguments=("torch", "bfloat16")),
        Configuration("bare", "run_bare.py"),
        Configuration("pfl", "run_pfl.py", 1, pfl),
    ]
    found = on_processors if device == "cpu" else on_a_card
    return {configuration.name: configuration for configuration in found}


def python_of(configuration: Configuration, folder: Path) -> Path:
    """Return the Python for a configuration's script; make its environment if it is missing.

    Raises:
        NotInstalled: pip fails; the message is its last line.
    """
    if not configuration.packages:
        return Path(sys.executable)
    named = (*configuration.bare, *configuration.packages)[0]
    where = folder / named.partition("=")[0].partition("[")[0]
    bare = (("--no-deps", *configuration.bare),) if configuration.bare else ()
    return python_in(where, (_TORCH, "numpy", *configuration.packages), *bare)
