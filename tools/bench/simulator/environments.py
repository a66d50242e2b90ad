"""Rivals' own environments: made once, by pip, beside the results."""

import sys
from dataclasses import dataclass
from pathlib import Path

from fleetune.tools.bench.own_environment import python_in
from fleetune.tools.simulator.ray_engine.crew import WORKERS_A_CARD

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
class Player:
    """A simulator.

    Attributes:
        name: in tables.
        script: in `players`.
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


def players(cores: int, device: str = "cpu") -> dict[str, Player]:
    """All there are that train on this, by name; on processors each of those that can both with one process
    and with one a core.
    """
    pfl, flwr = ("pfl==0.6.0",), ("flwr[simulation]==1.41.0",)
    on_processors = [
        Player("fleetune", "play_fleetune.py", cores),
        Player("fleetune-1", "play_fleetune.py", 1),
        Player("fleetune-fastest", "play_fleetune.py", cores, arguments=("fastest",)),
        Player("fleetune-bfloat16", "play_fleetune.py", cores, arguments=("torch", "bfloat16")),
        Player("bare", "play_bare.py"),
        Player("pfl", "play_pfl.py", 1, pfl),
        Player("pfl-all", "play_pfl.py", cores, pfl, by_torchrun=True),
        Player("flwr", "play_flwr.py", cores, flwr),
        Player("appfl", "play_appfl.py", 1, _FOR_APPFL, bare=("appfl==1.12.0",)),
    ]
    a_few = min(cores, WORKERS_A_CARD)
    on_a_card = [
        Player("fleetune", "play_fleetune.py", a_few),
        Player("fleetune-1", "play_fleetune.py", 1),
        Player("fleetune-at-once", "play_fleetune.py", 1, arguments=("torch", "float32", "10")),
        Player("fleetune-50-at-once", "play_fleetune.py", 1, arguments=("torch", "float32", "50")),
        Player("fleetune-at-once-bfloat16", "play_fleetune.py", 1, arguments=("torch", "bfloat16", "10")),
        Player("bare", "play_bare.py"),
        Player("pfl", "play_pfl.py", 1, pfl),
    ]
    found = on_processors if device == "cpu" else on_a_card
    return {player.name: player for player in found}


def python_of(player: Player, folder: Path) -> Path:
    """The Python that a player's script is run by; its environment is made where there is none yet.

    Raises:
        NotInstalled: pip fails; its last line says why.
    """
    if not player.packages:
        return Path(sys.executable)
    named = (*player.bare, *player.packages)[0]
    where = folder / named.partition("=")[0].partition("[")[0]
    bare = (("--no-deps", *player.bare),) if player.bare else ()
    return python_in(where, (_TORCH, "numpy", *player.packages), *bare)
