"""Rivals' own environments: made once, by pip, beside the results."""

import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rival_environments import python_in
from fleetune.tools.simulator.engine import WORKERS_A_CARD

_TORCH = "torch==2.13.0"  # the same for all, as in the Makefile
# Of what APPFL requires, what its simulator imports: with all of it, clouds included, pip does not end.
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
    """A simulator.

    Attributes:
        name: in tables.
        script: in `configurations`.
        processes: that train.
        packages: that pip installs for it; empty: it runs here.
        bare: that pip installs besides, without what they require.
        by_torchrun: it is started in as many copies as it has processes.
        arguments: that its script takes besides.
    """

    name: str
    script: str
    processes: int = 1
    packages: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()
    by_torchrun: bool = False
    arguments: tuple[str, ...] = ()


def configurations(cores: int, device: str = "cpu") -> dict[str, Configuration]:
    """All there are that train on this, by name; on processors each of those that can both with one process
    and with one a core.
    """
    pfl, flwr = ("pfl==0.6.0",), ("flwr[simulation]==1.41.0",)
    on_processors = [
        Configuration("fleetune", "run_fleetune.py", cores),
        Configuration("fleetune-1", "run_fleetune.py", 1),
        Configuration("fleetune-fastest", "run_fleetune.py", cores, arguments=("fastest",)),
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
        Configuration("fleetune-at-once", "run_fleetune.py", 1, arguments=("torch", "float32", "10")),
        Configuration("fleetune-50-at-once", "run_fleetune.py", 1, arguments=("torch", "float32", "50")),
        Configuration(
            "fleetune-at-once-bfloat16", "run_fleetune.py", 1, arguments=("torch", "bfloat16", "10")
        ),
        Configuration("bare", "run_bare.py"),
        Configuration("pfl", "run_pfl.py", 1, pfl),
    ]
    found = on_processors if device == "cpu" else on_a_card
    return {configuration.name: configuration for configuration in found}


def python_of(configuration: Configuration, folder: Path) -> Path:
    """The Python that a configuration's script is run by; its environment is made where there is none yet.

    Raises:
        NotInstalled: pip fails; its last line says why.
    """
    if not configuration.packages:
        return Path(sys.executable)
    named = (*configuration.bare, *configuration.packages)[0]
    where = folder / named.partition("=")[0].partition("[")[0]
    bare = (("--no-deps", *configuration.bare),) if configuration.bare else ()
    return python_in(where, (_TORCH, "numpy", *configuration.packages), *bare)
