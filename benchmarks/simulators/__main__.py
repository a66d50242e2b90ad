"""Fleetune's simulator against others, alternating on this machine.

    python -m benchmarks.simulators --out simulator --data idx:fashion-mnist
    python -m benchmarks.simulators --out simulator --workloads lenet5 --only 'fleetune*,pfl*' --repeats 3
    python -m benchmarks.simulators --out on-card --device cuda:0 --workloads cnn,lenet5

Rivals are installed once, into their own environments in OUT/environments. Every finished run is a file in
OUT/runs (runs-cuda-0 and so on with a GPU), and the same command resumes after a stop.
"""

import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.process_usage import machine
from benchmarks.rival_environments import NotInstalled
from benchmarks.simulators.configurations import Configuration, configurations, python_of
from benchmarks.simulators.workloads import WORKLOADS
from fleetune.protocols.errors import SettingError
from fleetune.protocols.one_line import one_line_errors

if TYPE_CHECKING:
    from rich.console import Console

    from benchmarks.simulators.runs import Run

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_RUNS = "runs"


@app.command()
def simulators(
    out: Annotated[Path, typer.Option(help="folder of environments, runs, tables and a picture")] = Path(
        "simulator"
    ),
    data: Annotated[
        str, typer.Option(help="source of samples; default Fashion-MNIST, and UCI HAR for har-cnn")
    ] = "",
    workloads: Annotated[str, typer.Option(help=f"comma-separated: {', '.join(WORKLOADS)}")] = "cnn",
    only: Annotated[str, typer.Option(help="simulators, comma-separated, `pfl*`")] = "*",
    repeats: Annotated[int, typer.Option(min=1, help="runs of each configuration")] = 5,
    device: Annotated[str, typer.Option(help="what torch trains on: cpu, cuda:0")] = "cpu",
) -> None:
    """Measure round time, processor time and memory of Fleetune and of other simulators."""
    with one_line_errors("benchmarks.simulators"):
        from rich.console import Console

        _run_all(out, data, _named(workloads), _wanted(only, device), repeats, device, Console())


def _named(workloads: str) -> list[str]:
    names = workloads.split(",")
    for name in names:
        if name not in WORKLOADS:
            raise SettingError(f"--workloads {name}: unknown; known: {', '.join(WORKLOADS)}")
    return names


def _wanted(only: str, device: str) -> dict[str, Configuration]:
    known = configurations(os.cpu_count() or 1, device)
    found = {name: one for name, one in known.items() if any(fnmatchcase(name, p) for p in only.split(","))}
    if not found:
        raise SettingError(f"--only {only}: unknown; known: {', '.join(known)}")
    return found


def _run_all(
    out: Path,
    data: str,
    names: list[str],
    wanted: dict[str, Configuration],
    repeats: int,
    device: str,
    console: "Console",
) -> None:
    from benchmarks.simulators.report import write_results
    from benchmarks.simulators.runs import RunFailed, run, save, saved
    from benchmarks.simulators.workloads import lay_out
    from fleetune.edge_agent.training.gpu.torch_device import name_of, torch_device

    where, kept = machine(), out / _RUNS
    if device != "cpu":
        where, kept = (
            f"{where}, {name_of(torch_device(device))}",
            out / f"{_RUNS}-{device.replace(':', '-')}",
        )
    for name in names:
        if not (out / "workloads" / name / "workload.json").exists():
            lay_out(WORKLOADS[name], data, out / "workloads" / name)
    missing: dict[str, str] = {}
    pythons = {}
    for configuration in wanted.values():
        try:
            with console.status(f"environment of {configuration.name}"):
                pythons[configuration.name] = python_of(configuration, out / "environments")
        except NotInstalled as problem:
            missing[configuration.name] = str(problem)
    kept.mkdir(parents=True, exist_ok=True)
    turns = list(_turns(names, wanted, repeats))
    for turn, (name, configuration, repeat) in enumerate(turns, start=1):
        path = kept / f"{name}-{configuration.name}-{repeat}.json"
        if configuration.name in missing or saved(path) is not None:
            continue
        with console.status(f"{turn} of {len(turns)}: {name} by {configuration.name}"):
            try:
                done = run(
                    configuration, pythons[configuration.name], out / "workloads" / name, repeat, device
                )
            except RunFailed as problem:
                missing[configuration.name] = str(problem)
                continue
        save(done, path)
        console.print(f"{name} by {configuration.name}: {done.round_s:.2f} s a round", highlight=False)
    everything = {name: _runs_of(name, kept) for name in WORKLOADS}
    there = {name: runs for name, runs in everything.items() if runs}
    console.print(write_results(there, missing, where, out), markup=False, highlight=False, soft_wrap=True)


def _turns(
    names: list[str], wanted: dict[str, Configuration], repeats: int
) -> "Iterator[tuple[str, Configuration, int]]":
    """Alternate between simulators, so that other load on the machine affects all of them."""
    for name in names:
        for repeat in range(repeats):
            for configuration in wanted.values():
                yield name, configuration, repeat


def _runs_of(name: str, folder: Path) -> "list[Run]":
    from benchmarks.simulators.runs import saved

    found = [saved(path) for path in sorted(folder.glob(f"{name}-*.json"))]
    return [one for one in found if one is not None]


if __name__ == "__main__":
    app()
