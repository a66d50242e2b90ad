"""Rivals' own environments: made once, by pip, beside the results."""

import sys
from dataclasses import dataclass
from pathlib import Path

from fleetune.tools.bench.own_environment import python_in

_TORCH = "torch==2.13.0"  # the same for all, as in the Makefile


@dataclass(frozen=True)
class Player:
    """A simulator.

    Attributes:
        name: in tables.
        script: in `players`.
        processes: that train.
        packages: that pip installs for it; empty: it runs here.
        by_torchrun: it is started in as many copies as it has processes.
    """

    name: str
    script: str
    processes: int = 1
    packages: tuple[str, ...] = ()
    by_torchrun: bool = False


def players(cores: int) -> dict[str, Player]:
    """All there are, by name; each of those that can both with one process and with one a core."""
    pfl, flwr = ("pfl==0.6.0",), ("flwr[simulation]==1.41.0",)
    found = [
        Player("fleetune", "play_fleetune.py", cores),
        Player("fleetune-1", "play_fleetune.py", 1),
        Player("bare", "play_bare.py"),
        Player("pfl", "play_pfl.py", 1, pfl),
        Player("pfl-all", "play_pfl.py", cores, pfl, by_torchrun=True),
        Player("flwr", "play_flwr.py", cores, flwr),
    ]
    return {player.name: player for player in found}


def python_of(player: Player, folder: Path) -> Path:
    """The Python that a player's script is run by; its environment is made where there is none yet.

    Raises:
        NotInstalled: pip fails; its last line says why.
    """
    if not player.packages:
        return Path(sys.executable)
    where = folder / player.packages[0].partition("=")[0].partition("[")[0]
    return python_in(where, (_TORCH, "numpy", *player.packages))
