"""What the simulation says of a fleet behind its links, and what the same run.toml does as real processes.

    python -m fleetune.tools.bench.shaped_links examples/shaped-links.toml --out FOLDER --repeats 2

A rehearsal of real agents first, by which the simulated boards get this machine's speed; then each way is
simulated, as a prediction; then each is played by real processes, in turn: a coordinator with its broker,
and an agent a device in a network namespace of its own, behind that device's link and with its samples.
No sensor here counts joules: all are reckoned, from real seconds or simulated ones, by the watts of the
`generic` board (a Raspberry Pi 4's), and agents are told that they are such boards.
FOLDER gets shaped-links.json and shaped-links.png, and the folders of all runs. Needs Linux and root.
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
from fleetune.tools.stop_signals import ToldInterrupt, in_one_line

if TYPE_CHECKING:
    from fleetune.tools.bench.shaped_links.show import Shaped

WAYS = {
    "paced": ["objective.minimise=time", "objective.most_work=4"],
    "bytes": ["objective.minimise=bytes", "objective.most_work=4"],
    "energy": ["objective.minimise=energy", "objective.most_work=4"],
    "p02": ["fleet.ratios=[0.2]"],
    "p04": ["fleet.ratios=[0.4]"],
    "fedavg": ["method.name=fedavg", "fleet.ratios=[1.0]"],
}
FILE = "shaped-links.json"
REHEARSAL = ["fleet.ratios=[0.2]"]
CHOICES = ", ".join(WAYS)


def main(
    run_file: Annotated[Path, typer.Argument(help="with a [fleet] of links")],
    out: Annotated[Path, typer.Option(help="a new folder")],
    ways: Annotated[str, typer.Option(help=f"comma-separated, of {CHOICES}")] = ",".join(WAYS),
    repeats: Annotated[int, typer.Option(min=1, help="real runs of each way, taking turns")] = 1,
    target: Annotated[float, typer.Option(help="score whose seconds are told")] = 0.5,
    rehearsed: Annotated[int, typer.Option(min=2, help="rounds of the rehearsal")] = 8,
    workers: Annotated[int, typer.Option(help="processes that simulate")] = os.cpu_count() or 1,
    changes: Annotated[list[str], typer.Option("--set", help="section.key=value, for all; may repeat")] = [],  # noqa: B006
) -> None:
    """Predicted against actual, of a fleet behind shaped links."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with in_one_line("shaped-links"):
        asked = {}
        for name in ways.split(","):
            if name not in WAYS:
                raise SettingError(f"--ways: {name!r} is none of {CHOICES}")
            asked[name] = WAYS[name]
        if out.exists():
            raise SettingError(f"--out {out} is there already; name a new folder")
        try:
            _measure(run_file, out, asked, repeats, target, rehearsed, workers, changes)
        except KeyboardInterrupt:
            kept = (
                f"{out / FILE} has what was measured" if (out / FILE).exists() else "nothing was measured yet"
            )
            _say(f"shaped-links: stopped; {kept}")
            raise ToldInterrupt from None


def _measure(
    run_file: Path,
    out: Path,
    asked: dict[str, list[str]],
    repeats: int,
    target: float,
    rehearsed: int,
    workers: int,
    changes: list[str],
) -> None:
    from fleetune.coordinator.reports.pictures.theme import LIGHT, picture
    from fleetune.firmware_profiles import load_file
    from fleetune.tools.bench.shaped_links import show
    from fleetune.tools.bench.shaped_links.courses import course_of
    from fleetune.tools.bench.shaped_links.real_fleet import play
    from fleetune.tools.bench.shaped_links.simulated_fleet import simulated
    from fleetune.tools.bench.shaped_links.this_machine import board_file, speeds, write_boards
    from fleetune.tools.links.show import words
    from fleetune.tools.simulator.simulated_fleet import simulated_devices

    settings = read_run(run_file, changes)
    everywhere = [*changes, f"round.start_with={settings.fleet.devices}"]
    rehearsal = [*everywhere, *REHEARSAL, f"run.rounds={rehearsed}", "run.final_evaluation=false"]
    machine = speeds(read_run(run_file, rehearsal), play(run_file, rehearsal, out / "rehearsal"))
    listed = write_boards(machine, out / "boards")
    boards = {device: load_file(board_file(out / "boards", device)) for device in machine.gflops}
    speed = ", ".join(f"{device} {gflops:.1f}" for device, gflops in machine.gflops.items())
    _say(f"rehearsed, GFLOPS: {speed}; from round to round a factor of {math.exp(machine.jitter):.2f}")
    found = {}
    for name, own in asked.items():
        rounds = simulated(run_file, [*everywhere, *own, *listed], out / "simulated" / name, workers)
        found[name] = show.Way(own, course_of(rounds, boards))
        _say(f"{name}: {found[name].predicted.seconds:.1f} s simulated")
    links = {one.name: words(one.link) for one in simulated_devices(settings)}
    told = show.Shaped(settings.run.name, target, machine.gflops, machine.jitter, links, found)
    for repeat in range(repeats):
        for name, own in asked.items():
            rounds = play(run_file, [*everywhere, *own], out / f"real-{repeat}" / name, out / "boards")
            found[name].actual.append(course_of(rounds, boards))
            _say(f"{name}: {found[name].actual[-1].seconds:.1f} s for real")
            _keep(told, out)
    score = task_of(settings.task).score
    write_atomically(
        out / "shaped-links.png", picture(show.draw(told, score, LIGHT), LIGHT, "png"), mode=None
    )
    console = Console(width=None if sys.stdout.isatty() else 130)
    console.print(show.table(told, score))
    console.print(show.parts_table(told))


def _keep(told: "Shaped", out: Path) -> None:
    """What is measured so far, as JSON."""
    write_atomically(
        out / FILE, msgspec.json.format(msgspec.json.encode(told.reckoned()), indent=1), mode=None
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    typer.run(main)
