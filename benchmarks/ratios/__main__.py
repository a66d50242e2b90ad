"""`python -m benchmarks.ratios`: are proposed ratios better than fixed ones?

    python -m benchmarks.ratios examples/mixed-fleet.toml --seeds 3
    python -m benchmarks.ratios examples/mixed-fleet.toml --fleets own,thin-links --methods fedspu,kapc-bls
    python -m benchmarks.ratios examples/mixed-fleet.toml --candidates 0.4,0.4+oort,time --seeds 2

Each run is kept in RUNS/NAME.ratios. After an interruption the same command continues; with more fleets,
methods, candidates or seeds it executes only the new runs. The tables have the finished runs that were asked
for.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleetune.protocols.errors import SettingError
from fleetune.protocols.settings.run_toml import read_run
from fleetune.protocols.tasks import task_of
from fleetune.tools.stop_signals import in_one_line

if TYPE_CHECKING:
    from fleetune.tools.compare.engine import Outcome


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def ratios(
    run_file: Annotated[Path, typer.Argument(help="the run's settings, see examples/mixed-fleet.toml")],
    fleets: Annotated[
        str, typer.Option(help="comma-separated: own, thin-links, slow-boards, batteries")
    ] = "own",
    methods: Annotated[str | None, typer.Option(help="comma-separated; else the file's own")] = None,
    candidates: Annotated[
        str,
        typer.Option(help="ratios, fedavg, and what is to beat them: time, bytes, energy, 0.4+oort"),
    ] = "0.2,0.4,0.6,fedavg,time,bytes,energy",
    seeds: Annotated[int, typer.Option(min=1, help="of each, with run.seed and the seeds after it")] = 3,
    target: Annotated[
        float | None, typer.Option(help="score, e.g. 0.72; else 97 % of what the best ratio ended with")
    ] = None,
    runs: Annotated[Path, typer.Option("--runs", help="where runs are kept")] = Path("runs"),
    workers: Annotated[int | None, typer.Option(help="runs at a time; else one a core")] = None,
    changes: Annotated[
        list[str], typer.Option("--set", help="section.key=value on top of RUN_FILE; may repeat")
    ] = [],  # noqa: B006 - typer requires a list as default
) -> None:
    """Seconds, joules and bytes until a fleet is good: proposed ratios against every fixed one."""
    with in_one_line("benchmarks.ratios"):
        from rich.console import Console

        from benchmarks.ratios.matrix import candidates_of, groups_of
        from benchmarks.ratios.report import write_results
        from benchmarks.ratios.verdicts import verdicts
        from fleetune.coordinator.metrics.personal_scores import better_by
        from fleetune.tools.compare.configurations import seeds_of
        from fleetune.tools.compare.engine import Execution, Experiment, run_experiment

        settings, console = read_run(run_file, changes), Console()
        if better_by(task_of(settings.task).score) < 0:
            raise SettingError(
                "task.kind: expected a task with scores of which more is better, e.g. accuracy"
            )
        asked, wanted = candidates_of(candidates), (methods or settings.method["name"]).split(",")
        _check_settings_are_used(changes, settings.method["name"], wanted)
        groups, configurations = groups_of(settings, fleets.split(","), wanted, asked)
        folder = runs / f"{settings.run.name}.ratios"
        crew = os.cpu_count() or 1 if workers is None else workers
        execution = Execution(folder, crew, fresh=False, console=console)

        def report(outcome: "Outcome") -> None:
            runs = outcome.comparison.runs
            found = {group: verdicts(group, asked, runs, target) for group in groups}
            text = write_results({group: some for group, some in found.items() if some}, folder)
            console.print(text, markup=False, highlight=False, soft_wrap=True)
            console.print(f"  {folder / 'results.md'}", soft_wrap=True)

        experiment = Experiment(settings, configurations, seeds_of(settings, seeds), target)
        run_experiment(experiment, execution, report)


def _check_settings_are_used(changes: list[str], own: str, methods: list[str]) -> None:
    """Raises SettingError: --set changes [method], and the method of the file is not among the methods."""
    unused = next((one for one in changes if one.startswith("method.")), None)
    if unused is not None and own not in methods:
        raise SettingError(
            f"--set {unused}: it is for the file's method, {own}, which --methods leaves out;"
            f" for {methods[0]} add --set method.name={methods[0]}"
        )


if __name__ == "__main__":
    app()
