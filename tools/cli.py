"""edge-sim: simulate a fleet before any device is bought."""

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

RunFile = Annotated[Path, typer.Argument(help="TOML file with the run's settings, see examples/")]
RunsFolder = Annotated[Path, typer.Option("--runs", help="folder of the runs")]
Workers = Annotated[
    int | None,
    typer.Option(
        help="training processes with one thread each; 0: train in this process; default: one for each core"
    ),
]
Fresh = Annotated[bool, typer.Option(help="replace the files of an earlier run of this name")]
Trackers = Annotated[
    list[str],
    typer.Option(
        "--tracker",
        help="tracker that follows the run: tensorboard, mlflow or module:function; may be repeated",
    ),
]
Changes = Annotated[
    list[str],
    typer.Option("--set", help="section.key=value, replaces that setting of RUN_FILE; may be repeated"),
]

EngineChoice = Annotated[
    Engine, typer.Option(help="where devices train: in local processes, or on the nodes of a Ray cluster")
]
Cards = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="device that torch trains on: cpu, or cards, e.g. cuda:0,cuda:1; default: fleet.train_on",
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        help="address of the Ray cluster; default: $RAY_ADDRESS, or one that lasts as long as this command"
    ),
]


@app.callback()
def main(
    version: Annotated[  # noqa: ARG001 - acted upon by its callback
        bool,
        typer.Option("--version", help="print the version and exit", is_eager=True, callback=show_version),
    ] = False,
) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def _with_cards(changes: list[str], cards: str | None) -> list[str]:
    return changes if cards is None else [*changes, f"fleet.train_on={cards}"]


def _num_cards(cards: str | None) -> int:
    return len(FleetSection(train_on=cards or PROCESSOR).cards)


def _begin(workers: int | None) -> None:
    """Start workers early, so that they import their modules while this process imports its own."""
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
    follow: Annotated[
        bool, typer.Option(help="print one line per round, for a log, instead of a progress bar")
    ] = False,
    tracker: Trackers = [],  # noqa: B006 - typer's way of saying it
    changes: Changes = [],  # noqa: B006 - typer's way of saying it
) -> None:
    """Simulate RUN_FILE and leave summary.json, rounds.jsonl and report.html in its folder."""
    with in_one_line("edge-sim"):
        _begin(workers)
        from fleetune.tools.simulator.device_specs import with_group_devices
        from fleetune.tools.simulator.show import show_run

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
    seeds: Annotated[
        int, typer.Option(help="number of runs of each method, with run.seed and the seeds after it")
    ] = 1,
    target: Annotated[
        float | None,
        typer.Option(help="accuracy whose cost is reported, e.g. 0.9; default: 95 % of the best"),
    ] = None,
    runs: RunsFolder = Path("runs"),
    workers: Workers = None,
    engine: EngineChoice = Engine.LOCAL,
    address: Address = None,
    device: Cards = None,
    fresh: Annotated[bool, typer.Option(help="repeat finished runs too")] = False,
    tracker: Trackers = [],  # noqa: B006
    changes: Changes = [],  # noqa: B006
) -> None:
    """Simulate RUN_FILE with several methods and seeds, and compare them.

    The file's section `method` is for the method that it names; other methods have their defaults.
    `compare.fedspu` sets keys of one method. `compare.mine` with name = "fedspu" is a second configuration of
    it: --methods fedspu,mine. On the command line: --set compare.fedspu.KEY=VALUE.

    Writes report.html, runs.csv and pictures to NAME.compare. After an interruption the same command
    continues. Only runs whose settings changed are repeated.
    """
    with in_one_line("edge-sim"):
        _begin(workers)
        from fleetune.tools.research.compare import compare as compare_methods
        from fleetune.tools.simulator.progress_view import console

        compare_methods(
            read_run(run_file, _with_cards(changes, device)),
            methods,
            seeds=seeds,
            runs=runs,
            target=target,
            workers=workers,
            fresh=fresh,
            trackers=tracker,
            engine=engine,
            address=address,
            console=console,
        )


@app.command()
def sweep(
    run_file: RunFile,
    over: Annotated[
        list[str], typer.Option(help="section.key=value,value; may be repeated: all combinations run")
    ],
    search: Annotated[
        int | None, typer.Option(help="number of trials that Optuna chooses, also in ranges: low..high[:log]")
    ] = None,
    seeds: Annotated[
        int, typer.Option(help="number of runs of each combination, with run.seed and the seeds after it")
    ] = 1,
    target: Annotated[
        float | None,
        typer.Option(help="accuracy whose cost is reported, e.g. 0.9; default: 95 % of the best"),
    ] = None,
    runs: RunsFolder = Path("runs"),
    workers: Workers = None,
    engine: EngineChoice = Engine.LOCAL,
    address: Address = None,
    device: Cards = None,
    fresh: Annotated[bool, typer.Option(help="repeat finished runs too")] = False,
    tracker: Trackers = [],  # noqa: B006
    changes: Changes = [],  # noqa: B006
) -> None:
    """Simulate RUN_FILE with every combination of some settings, and rank the combinations.

    edge-sim sweep fashion.toml --over fleet.ratios=[0.2],[0.4] --over training.epochs=1,3
    edge-sim sweep fashion.toml --over training.learning_rate=0.01..0.2:log --search 40

    Writes report.html, runs.csv and pictures to NAME.sweep. After an interruption the same command continues.
    With more values or seeds it executes only the new runs.
    """
    with in_one_line("edge-sim"):
        _begin(workers)
        from fleetune.tools.research.sweep import sweep as sweep_settings
        from fleetune.tools.simulator.progress_view import console

        sweep_settings(
            read_run(run_file, _with_cards(changes, device)),
            over,
            seeds=seeds,
            runs=runs,
            target=target,
            search=search,
            workers=workers,
            fresh=fresh,
            trackers=tracker,
            engine=engine,
            address=address,
            console=console,
        )


@app.command()
def paper(
    cell: Annotated[
        str | None,
        typer.Argument(help="name of a table cell, `kapc*`, `all`, or a cell's file; without it, list all"),
    ] = None,
    seeds: Annotated[
        int, typer.Option(help="number of runs, with the cell's run.seed and the seeds after it")
    ] = 3,
    data: Annotated[str | None, typer.Option(help="folder of the data set's original files")] = None,
    runs: RunsFolder = Path("runs"),
    workers: Workers = None,
    engine: EngineChoice = Engine.LOCAL,
    address: Address = None,
    device: Cards = None,
    fresh: Annotated[bool, typer.Option(help="repeat finished runs too")] = False,
    changes: Changes = [],  # noqa: B006
) -> None:
    """Run a cell of a paper's table, and show the paper's number and ours.

    Both have the same definition of accuracy. The files in tools/papers mark what the paper does not give as
    our choice. With --set or less data a run is labelled as scaled, and nothing is claimed.

    Writes result.json to RUNS/paper/CELL. After an interruption the same command continues.
    `all`, or a pattern, runs many cells, the cheapest first, and skips those whose data is not here.
    """
    with in_one_line("edge-sim"):
        from fleetune.protocols.errors import SettingError
        from fleetune.tools.compare.engine import Execution
        from fleetune.tools.papers.paper import ALL, list_cells, run_cell, run_cells
        from fleetune.tools.simulator.progress_view import console

        if cell is None:
            list_cells(console)
            return
        several = cell == ALL or bool(set(cell) & set("*?["))
        if several and (changes or data):
            raise SettingError("--set and --data go with one cell; data for many is found in $FLEETUNE_DATA")
        changes = _with_cards(changes, device)
        with open_workers(engine, address, workers, _num_cards(device)) as (most, cluster):
            execution = Execution(runs / "paper", most, fresh=fresh, console=console, cluster=cluster)
            if several:
                run_cells(cell, execution, seeds=seeds, changes=changes)
            else:
                run_cell(cell, execution, seeds=seeds, changes=changes, data=data)


@app.command()
def table(
    name: Annotated[
        str | None, typer.Argument(help="name of a table, e.g. kapc-1; without it the tables are listed")
    ] = None,
    seeds: Annotated[
        int, typer.Option(help="number of runs of each cell, with the cell's run.seed and the seeds after it")
    ] = 3,
    show: Annotated[bool, typer.Option(help="start no runs, only show the finished ones")] = False,
    runs: RunsFolder = Path("runs"),
    workers: Workers = None,
    engine: EngineChoice = Engine.LOCAL,
    address: Address = None,
    device: Cards = None,
    fresh: Annotated[bool, typer.Option(help="repeat finished runs too")] = False,
    changes: Changes = [],  # noqa: B006
) -> None:
    """Run every cell of a paper's table, and show the paper's numbers and ours.

    The cheapest come first; a cell whose data is not here is skipped with the reason. Cells are kept as
    `edge-sim paper` keeps them. Leaves table-NAME.md and .json in RUNS/paper. After an interruption the same
    command continues.
    """
    with in_one_line("edge-sim"):
        from fleetune.tools.compare.engine import Execution
        from fleetune.tools.papers.paper_tables import TableRequest, fill_table, list_tables
        from fleetune.tools.simulator.progress_view import console

        if name is None:
            list_tables(console)
            return
        changes = _with_cards(changes, device)
        with open_workers(engine, address, workers, _num_cards(device)) as (most, cluster):
            execution = Execution(runs / "paper", most, fresh=fresh, console=console, cluster=cluster)
            fill_table(name, TableRequest(seeds, changes, show, execution))


@app.command()
def split(
    run_file: RunFile,
    out: Annotated[Path, typer.Argument(help="folder for the .npz files, one for each device")],
    changes: Changes = [],  # noqa: B006
) -> None:
    """Write each simulated device's share of the data as a file for `edge-agent run --data npz:FILE`."""
    with in_one_line("edge-sim"):
        from fleetune.tools.simulator.write_device_files import write_device_files

        for path in write_device_files(read_run(run_file, changes), out):
            print(path)


if __name__ == "__main__":
    app()
