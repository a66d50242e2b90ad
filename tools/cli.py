"""edge-sim: a fleet before any device is bought."""

import os
from pathlib import Path
from typing import Annotated

import typer

from fleetune.protocols.settings.run_toml import read_run
from fleetune.protocols.settings.section import PROCESSOR
from fleetune.protocols.settings.simulation import FleetSection
from fleetune.protocols.version import show_version
from fleetune.tools import link_cli
from fleetune.tools.bench.command import app as bench_app
from fleetune.tools.simulator.engine import Engine, open_workers
from fleetune.tools.simulator.workers.worker_processes import warm_up
from fleetune.tools.stop_signals import in_one_line

app = typer.Typer(
    help="Simulate a fleet: the real round engine, methods, codec and training on a virtual clock.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(link_cli.app, name="link")
app.add_typer(bench_app, name="bench")

RunFile = Annotated[Path, typer.Argument(help="the run's settings, see examples/")]
RunsFolder = Annotated[Path, typer.Option("--runs", help="where runs are kept")]
Workers = Annotated[
    int | None,
    typer.Option(
        help="training processes, one thread each; 0: none but this one; else one a core, here or there"
    ),
]
Fresh = Annotated[bool, typer.Option(help="replace what an earlier run of this name left")]
Trackers = Annotated[
    list[str], typer.Option("--tracker", help="tensorboard, mlflow or module:function follows; may repeat")
]
Changes = Annotated[list[str], typer.Option("--set", help="section.key=value on top of RUN_FILE; may repeat")]

EngineChoice = Annotated[
    Engine, typer.Option(help="where devices work: here, or on the nodes of a Ray cluster")
]
Cards = Annotated[
    str | None,
    typer.Option("--device", help="what torch trains on: cpu, or cards, e.g. cuda:0,cuda:1; fleet.train_on"),
]
Address = Annotated[
    str | None,
    typer.Option(
        help="of the Ray cluster; else $RAY_ADDRESS; without either one begins and ends with this command"
    ),
]


@app.callback()
def main(
    version: Annotated[  # noqa: ARG001 - acted upon by its callback
        bool, typer.Option("--version", help="print it and stop", is_eager=True, callback=show_version)
    ] = False,
) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def _with_cards(changes: list[str], cards: str | None) -> list[str]:
    return changes if cards is None else [*changes, f"fleet.train_on={cards}"]


def _num_cards(cards: str | None) -> int:
    return len(FleetSection(train_on=cards or PROCESSOR).cards)


def _begin(workers: int | None) -> None:
    """Workers import what they need while this process does."""
    if workers != 0:
        warm_up()


@app.command()
def run(
    run_file: RunFile,
    runs: RunsFolder = Path("runs"),
    workers: Workers = None,
    engine: EngineChoice = Engine.LOCAL,
    address: Address = None,
    device: Cards = None,
    fresh: Fresh = False,
    follow: Annotated[bool, typer.Option(help="a line a round, for a log, instead of a bar")] = False,
    tracker: Trackers = [],  # noqa: B006 - typer's way of saying it
    changes: Changes = [],  # noqa: B006 - typer's way of saying it
) -> None:
    """Simulate RUN_FILE and leave summary.json, rounds.jsonl and report.html in its folder."""
    with in_one_line("edge-sim"):
        _begin(workers)
        from fleetune.tools.simulator.show import show_run
        from fleetune.tools.simulator.simulated_fleet import with_group_devices

        settings = with_group_devices(read_run(run_file, _with_cards(changes, device)))
        folder = runs / settings.run.name
        with open_workers(engine, address, workers, len(settings.fleet.cards)) as (most, cluster):
            show_run(
                settings,
                folder,
                workers=most,
                fresh=fresh,
                follow=follow,
                trackers=tracker,
                cluster=cluster,
            )


@app.command()
def compare(
    run_file: RunFile,
    methods: Annotated[
        str | None,
        typer.Option(help="comma-separated, `kapc*`, or `all`; else local-only, fedavg and the file's own"),
    ] = None,
    seeds: Annotated[int, typer.Option(help="runs of each method, with run.seed and the seeds after it")] = 1,
    target: Annotated[
        float | None, typer.Option(help="accuracy whose cost is asked for, e.g. 0.9; else 95 % of the best")
    ] = None,
    runs: RunsFolder = Path("runs"),
    workers: Workers = None,
    engine: EngineChoice = Engine.LOCAL,
    address: Address = None,
    device: Cards = None,
    fresh: Annotated[bool, typer.Option(help="run finished ones again, too")] = False,
    tracker: Trackers = [],  # noqa: B006
    changes: Changes = [],  # noqa: B006
) -> None:
    """Simulate RUN_FILE with several methods and seeds and put them side by side.

    The file's section `method` goes to the method it names; others run with their defaults.
    `compare.fedspu` sets keys of one method; `compare.mine` with name = "fedspu" enters it again:
    --methods fedspu,mine. On the command line: --set compare.fedspu.KEY=VALUE.

    Leaves report.html, methods.md, methods.csv, runs.csv, rounds.csv and pictures in NAME.compare. The same
    command again goes on where it was stopped, and runs again only what has other settings now.
    """
    with in_one_line("edge-sim"):
        _begin(workers)
        from fleetune.tools.compare.compare import compare as side_by_side
        from fleetune.tools.compare.contenders import labels_of
        from fleetune.tools.simulator.show import console
        from fleetune.tools.simulator.simulated_fleet import with_group_devices

        settings = with_group_devices(read_run(run_file, _with_cards(changes, device)))
        folder = runs / f"{settings.run.name}.compare"
        with open_workers(engine, address, workers, len(settings.fleet.cards)) as (most, cluster):
            side_by_side(
                settings,
                labels_of(settings, methods),
                folder,
                seeds=seeds,
                target=target,
                workers=most,
                fresh=fresh,
                console=console,
                trackers=tracker,
                cluster=cluster,
            )


@app.command()
def sweep(
    run_file: RunFile,
    over: Annotated[list[str], typer.Option(help="section.key=value,value; may repeat: all combinations")],
    search: Annotated[
        int | None, typer.Option(help="so many trials that Optuna chooses, also in ranges: low..high[:log]")
    ] = None,
    seeds: Annotated[
        int, typer.Option(help="runs of each combination, with run.seed and the seeds after it")
    ] = 1,
    target: Annotated[
        float | None, typer.Option(help="accuracy whose cost is asked for, e.g. 0.9; else 95 % of the best")
    ] = None,
    runs: RunsFolder = Path("runs"),
    workers: Workers = None,
    engine: EngineChoice = Engine.LOCAL,
    address: Address = None,
    device: Cards = None,
    fresh: Annotated[bool, typer.Option(help="run finished ones again, too")] = False,
    tracker: Trackers = [],  # noqa: B006
    changes: Changes = [],  # noqa: B006
) -> None:
    """Simulate RUN_FILE with every combination of some settings, and rank them.

    edge-sim sweep fashion.toml --over fleet.ratios=[0.2],[0.4] --over training.epochs=1,3
    edge-sim sweep fashion.toml --over training.learning_rate=0.01..0.2:log --search 40

    Leaves report.html, sweep.csv, runs.csv, rounds.csv, summary.json and pictures in NAME.sweep. The same
    command again goes on where it was stopped; with more values or seeds it plays only what is new.
    """
    with in_one_line("edge-sim"):
        _begin(workers)
        from fleetune.tools.compare.axes import axes_of
        from fleetune.tools.compare.side_by_side import Work
        from fleetune.tools.compare.sweep import sweep as all_combinations
        from fleetune.tools.simulator.show import console
        from fleetune.tools.simulator.simulated_fleet import with_group_devices

        settings = with_group_devices(read_run(run_file, _with_cards(changes, device)))
        axes, folder = axes_of(over), runs / f"{settings.run.name}.sweep"
        with open_workers(engine, address, workers, len(settings.fleet.cards)) as (most, cluster):
            work = Work(folder, most, fresh=fresh, console=console, trackers=tuple(tracker), cluster=cluster)
            all_combinations(settings, axes, work, seeds=seeds, target=target, search=search)


@app.command()
def paper(
    cell: Annotated[
        str | None,
        typer.Argument(help="a cell's name, `kapc*`, `all`, or a file like these; none: list them"),
    ] = None,
    seeds: Annotated[int, typer.Option(help="runs, with the cell's run.seed and the seeds after it")] = 3,
    data: Annotated[str | None, typer.Option(help="folder of the data set's original files")] = None,
    runs: RunsFolder = Path("runs"),
    workers: Workers = None,
    engine: EngineChoice = Engine.LOCAL,
    address: Address = None,
    device: Cards = None,
    fresh: Annotated[bool, typer.Option(help="run finished ones again, too")] = False,
    changes: Changes = [],  # noqa: B006
) -> None:
    """Run a cell of a paper's table and show the paper's number beside ours.

    Both are of the same definition of accuracy. The files in tools/papers mark what the paper does not
    give as our choice. With --set or fewer data a run is labelled as scaled, and nothing is claimed.

    Leaves result.json and result.md in RUNS/paper/CELL. The same command again goes on where it was stopped.
    `all`, or a pattern, plays many, the cheapest first, and passes over those whose data is not here.
    """
    with in_one_line("edge-sim"):
        from fleetune.protocols.errors import SettingError
        from fleetune.tools.papers.cells import ALL, list_cells, play_cell, play_cells
        from fleetune.tools.simulator.show import console

        if cell is None:
            list_cells(console)
            return
        several = cell == ALL or bool(set(cell) & set("*?["))
        if several and (changes or data):
            raise SettingError("--set and --data go with one cell; data for many is found in $FLEETUNE_DATA")
        changes = _with_cards(changes, device)
        with open_workers(engine, address, workers, _num_cards(device)) as (most, cluster):
            how = {"seeds": seeds, "runs": runs, "workers": most, "fresh": fresh, "cluster": cluster}
            if several:
                play_cells(cell, changes=changes, console=console, **how)  # type: ignore[arg-type]
            else:
                play_cell(cell, changes=changes, data=data, console=console, **how)  # type: ignore[arg-type]


@app.command()
def table(
    name: Annotated[str | None, typer.Argument(help="a table's name, e.g. kapc-1; none: list them")] = None,
    seeds: Annotated[
        int, typer.Option(help="runs of each cell, with its run.seed and the seeds after it")
    ] = 3,
    show: Annotated[bool, typer.Option(help="play nothing, show what is there")] = False,
    runs: RunsFolder = Path("runs"),
    workers: Workers = None,
    engine: EngineChoice = Engine.LOCAL,
    address: Address = None,
    device: Cards = None,
    fresh: Annotated[bool, typer.Option(help="run finished ones again, too")] = False,
    changes: Changes = [],  # noqa: B006
) -> None:
    """Run every cell of a paper's table and show the paper's numbers beside ours.

    The cheapest come first; a cell whose data is not here is passed over with the reason. Cells are kept as
    `edge-sim paper` keeps them. Leaves table-NAME.md and .json in RUNS/paper. The same command again goes on
    where it was stopped.
    """
    with in_one_line("edge-sim"):
        from fleetune.tools.papers.paper_tables import Asked, fill_table, list_tables
        from fleetune.tools.simulator.show import console

        if name is None:
            list_tables(console)
            return
        changes = _with_cards(changes, device)
        with open_workers(engine, address, workers, _num_cards(device)) as (most, cluster):
            fill_table(name, Asked(seeds, changes, runs, most, fresh, show, cluster), console)


@app.command()
def split(
    run_file: RunFile,
    out: Annotated[Path, typer.Argument(help="folder for one .npz a device")],
    changes: Changes = [],  # noqa: B006
) -> None:
    """Write each simulated device's share of the data as a file for `edge-agent run --data npz:FILE`."""
    with in_one_line("edge-sim"):
        from fleetune.tools.simulator.write_device_files import write_device_files

        for path in write_device_files(read_run(run_file, changes), out):
            print(path)


if __name__ == "__main__":
    app()
