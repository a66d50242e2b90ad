"""Simulation of a fleet behind shaped links against real processes with the same run.toml.

    python -m benchmarks.shaped_links examples/shaped-links.toml --out FOLDER --repeats 2

1. A calibration run of real agents measures the speed of this machine, which the simulated boards get.
2. Each configuration is simulated. The result is the prediction.
3. Each configuration runs as real processes, in turn: a coordinator with its broker, and an agent for each
   device. The agent runs in a network namespace behind that device's link, with the device's samples.

Joules are computed from real or simulated seconds and the watts of the `generic` board (a Raspberry Pi 4).
FOLDER gets shaped-links.json, shaped-links.png and the folders of all runs. Needs Linux and root.
"""

import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console

from fleetune.protocols.errors import SettingError
from fleetune.protocols.files import write_atomically
from fleetune.protocols.settings.run_toml import read_run
from fleetune.protocols.tasks import task_of
from fleetune.tools.stop_signals import ReportedInterrupt, in_one_line

if TYPE_CHECKING:
    from benchmarks.shaped_links.report import Shaped

CONFIGURATIONS = {
    "paced": ["objective.minimise=time", "objective.most_work=4"],
    "bytes": ["objective.minimise=bytes", "objective.most_work=4"],
    "energy": ["objective.minimise=energy", "objective.most_work=4"],
    "p02": ["fleet.ratios=[0.2]"],
    "p04": ["fleet.ratios=[0.4]"],
    "fedavg": ["method.name=fedavg", "fleet.ratios=[1.0]"],
}
FILE = "shaped-links.json"
CALIBRATION = ["fleet.ratios=[0.2]"]
CHOICES = ", ".join(CONFIGURATIONS)


def main(
    run_file: Annotated[Path, typer.Argument(help="a run.toml whose [fleet] has links")],
    out: Annotated[Path, typer.Option(help="a new folder")],
    configurations: Annotated[str, typer.Option(help=f"comma-separated, of {CHOICES}")] = ",".join(
        CONFIGURATIONS
    ),
    repeats: Annotated[int, typer.Option(min=1, help="real runs of each configuration, alternating")] = 1,
    target: Annotated[float, typer.Option(help="score up to which seconds are counted")] = 0.5,
    calibration_rounds: Annotated[int, typer.Option(min=2, help="rounds of the calibration run")] = 8,
    workers: Annotated[int, typer.Option(help="processes that simulate")] = os.cpu_count() or 1,
    changes: Annotated[list[str], typer.Option("--set", help="section.key=value, for all; may repeat")] = [],  # noqa: B006
) -> None:
    """Compare predicted and actual runs of a fleet behind shaped links."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with in_one_line("shaped-links"):
        chosen = {}
        for name in configurations.split(","):
            if name not in CONFIGURATIONS:
                raise SettingError(f"--configurations: {name!r} is none of {CHOICES}")
            chosen[name] = CONFIGURATIONS[name]
        if out.exists():
            raise SettingError(f"--out {out} exists already; name a new folder")
        try:
            _measure(run_file, out, chosen, repeats, target, calibration_rounds, workers, changes)
        except KeyboardInterrupt:
            kept = (
                f"{out / FILE} has what was measured" if (out / FILE).exists() else "nothing was measured yet"
            )
            _say(f"shaped-links: stopped; {kept}")
            raise ReportedInterrupt from None


def _measure(
    run_file: Path,
    out: Path,
    chosen: dict[str, list[str]],
    repeats: int,
    target: float,
    calibration_rounds: int,
    workers: int,
    changes: list[str],
) -> None:
    from benchmarks.shaped_links import report
    from benchmarks.shaped_links.measured_boards import board_file, speeds, write_boards
    from benchmarks.shaped_links.real_fleet import emulated_links, run_real_fleet
    from benchmarks.shaped_links.simulated_fleet import simulated
    from benchmarks.shaped_links.trajectories import trajectory_of
    from fleetune.coordinator.reports.pictures.theme import png
    from fleetune.firmware_profiles import load_file
    from fleetune.tools.links.show import words

    settings = read_run(run_file, changes)
    everywhere = [*changes, f"round.start_with={settings.fleet.devices}"]
    calibration = [
        *everywhere,
        *CALIBRATION,
        f"run.rounds={calibration_rounds}",
        "run.final_evaluation=false",
    ]
    machine = speeds(
        read_run(run_file, calibration), run_real_fleet(run_file, calibration, out / "calibration")
    )
    listed = write_boards(machine, out / "boards")
    boards = {device: load_file(board_file(out / "boards", device)) for device in machine.gflops}
    speed = ", ".join(f"{device} {gflops:.1f}" for device, gflops in machine.gflops.items())
    _say(f"calibrated, GFLOPS: {speed}; from round to round a factor of {math.exp(machine.jitter):.2f}")
    found = {}
    for name, own in chosen.items():
        rounds = simulated(run_file, [*everywhere, *own, *listed], out / "simulated" / name, workers)
        found[name] = report.Configuration(own, trajectory_of(rounds, boards))
        _say(f"{name}: {found[name].predicted.seconds:.1f} s simulated")
    links = {name: words(link) for name, link in emulated_links(settings).items()}
    results = report.Shaped(settings.run.name, target, machine.gflops, machine.jitter, links, found)
    for repeat in range(repeats):
        for name, own in chosen.items():
            rounds = run_real_fleet(
                run_file, [*everywhere, *own], out / f"real-{repeat}" / name, out / "boards"
            )
            found[name].actual.append(trajectory_of(rounds, boards))
            _say(f"{name}: {found[name].actual[-1].seconds:.1f} s for real")
            _write(results, out)
    score = task_of(settings.task).score
    write_atomically(out / "shaped-links.png", png(report.draw(results, score)), mode=None)
    console = Console(width=None if sys.stdout.isatty() else 130)
    console.print(report.table(results, score))
    console.print(report.parts_table(results))


def _write(results: "Shaped", out: Path) -> None:
    """Write the results so far as JSON."""
    write_atomically(
        out / FILE, msgspec.json.format(msgspec.json.encode(results.with_seconds()), indent=1), mode=None
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    typer.run(main)
