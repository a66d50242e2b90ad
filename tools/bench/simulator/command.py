"""`edge-sim bench simulator`: this simulator beside others, in turns on this machine.

    edge-sim bench simulator --out simulator --data idx:fashion-mnist
    edge-sim bench simulator --out simulator --workloads lenet5 --only 'fleetune*,pfl*' --repeats 3
    edge-sim bench simulator --out on-card --device cuda:0 --workloads cnn,lenet5

Rivals are installed into environments of their own in OUT/environments, once. Every play that came to its
end is a file in OUT/plays (of cards plays-cuda-0 and so on); the same command goes on where it was stopped.
"""

import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleetune.protocols.errors import SettingError
from fleetune.protocols.one_line import one_line_errors
from fleetune.tools.bench.looked_at import machine
from fleetune.tools.bench.own_environment import NotInstalled
from fleetune.tools.bench.simulator.environments import Player, players, python_of
from fleetune.tools.bench.simulator.workloads import WORKLOADS

if TYPE_CHECKING:
    from rich.console import Console

    from fleetune.tools.bench.simulator.play import Played

_PLAYS = "plays"


def simulator(
    out: Annotated[Path, typer.Option(help="folder of environments, plays, tables and a picture")] = Path(
        "simulator"
    ),
    data: Annotated[
        str, typer.Option(help="samples of all workloads; else Fashion-MNIST's, of har-cnn UCI HAR's")
    ] = "",
    workloads: Annotated[str, typer.Option(help=f"comma-separated: {', '.join(WORKLOADS)}")] = "cnn",
    only: Annotated[str, typer.Option(help="simulators, comma-separated, `pfl*`")] = "*",
    repeats: Annotated[int, typer.Option(min=1, help="plays of each")] = 5,
    device: Annotated[str, typer.Option(help="that torch trains on: cpu, cuda:0")] = "cpu",
) -> None:
    """Seconds of a round, processor time, memory: ours, pfl-research's, Flower's, APPFL's, a bare loop's."""
    with one_line_errors("edge-sim"):
        from rich.console import Console

        _play_all(out, data, _named(workloads), _wanted(only, device), repeats, device, Console())


def _named(workloads: str) -> list[str]:
    names = workloads.split(",")
    for name in names:
        if name not in WORKLOADS:
            raise SettingError(f"--workloads {name}: there is none; known: {', '.join(WORKLOADS)}")
    return names


def _wanted(only: str, device: str) -> dict[str, Player]:
    known = players(os.cpu_count() or 1, device)
    found = {name: one for name, one in known.items() if any(fnmatchcase(name, p) for p in only.split(","))}
    if not found:
        raise SettingError(f"--only {only}: there is none; known: {', '.join(known)}")
    return found


def _play_all(
    out: Path,
    data: str,
    names: list[str],
    wanted: dict[str, Player],
    repeats: int,
    device: str,
    console: "Console",
) -> None:
    from fleetune.edge_agent.training.cards.torch_device import name_of, torch_device
    from fleetune.tools.bench.simulator.play import PlayFailed, keep, play, recalled
    from fleetune.tools.bench.simulator.report import write_results
    from fleetune.tools.bench.simulator.workloads import lay_out

    where, kept = machine(), out / _PLAYS
    if device != "cpu":
        where, kept = (
            f"{where}, {name_of(torch_device(device))}",
            out / f"{_PLAYS}-{device.replace(':', '-')}",
        )
    for name in names:
        if not (out / "workloads" / name / "workload.json").exists():
            lay_out(WORKLOADS[name], data, out / "workloads" / name)
    missing: dict[str, str] = {}
    pythons = {}
    for player in wanted.values():
        try:
            with console.status(f"environment of {player.name}"):
                pythons[player.name] = python_of(player, out / "environments")
        except NotInstalled as problem:
            missing[player.name] = str(problem)
    kept.mkdir(parents=True, exist_ok=True)
    turns = list(_turns(names, wanted, repeats))
    for turn, (name, player, repeat) in enumerate(turns, start=1):
        path = kept / f"{name}-{player.name}-{repeat}.json"
        if player.name in missing or recalled(path) is not None:
            continue
        with console.status(f"{turn} of {len(turns)}: {name} by {player.name}"):
            try:
                played = play(player, pythons[player.name], out / "workloads" / name, repeat, device)
            except PlayFailed as problem:
                missing[player.name] = str(problem)
                continue
        keep(played, path)
        console.print(f"{name} by {player.name}: {played.round_s:.2f} s a round", highlight=False)
    everything = {name: _plays_of(name, kept) for name in WORKLOADS}
    there = {name: plays for name, plays in everything.items() if plays}
    console.print(write_results(there, missing, where, out), markup=False, highlight=False, soft_wrap=True)


def _turns(names: list[str], wanted: dict[str, Player], repeats: int) -> "Iterator[tuple[str, Player, int]]":
    """Simulators take turns, so that what else the machine does meets all of them."""
    for name in names:
        for repeat in range(repeats):
            for player in wanted.values():
                yield name, player, repeat


def _plays_of(name: str, folder: Path) -> "list[Played]":
    from fleetune.tools.bench.simulator.play import recalled

    found = [recalled(path) for path in sorted(folder.glob(f"{name}-*.json"))]
    return [one for one in found if one is not None]
