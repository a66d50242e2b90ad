"""Bytes that a fleet sends until an accuracy, with our encodings and with published rivals.

    python -m benchmarks.wire --out wire --seeds 3
    python -m benchmarks.wire --out wire --settings har --only "dense,stc*,sparse*"
    python -m benchmarks.wire --out wire --settings none --steps
    python -m benchmarks.wire --out wire --settings fashion-0.5 --data idx:fashion-mnist --only sparse-50

Every finished run is a file in OUT/runs, and the same command resumes after a stop. The tables contain all
runs in OUT, so a later command can add configurations, seeds or coordinator steps.
"""

from pathlib import Path
from typing import Annotated

import typer

from fleetune.protocols.one_line import one_line_errors

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def wire(
    out: Annotated[Path, typer.Option(help="folder of finished runs, tables and plots")] = Path("wire"),
    settings: Annotated[
        str,
        typer.Option(
            help="comma-separated: har, fashion-0.5, fashion-0.1, fashion-iid, news, digits-spoken; none"
        ),
    ] = "har,fashion-0.5",
    seeds: Annotated[int, typer.Option(min=1, help="runs of each configuration, seeds from 0")] = 3,
    only: Annotated[
        str, typer.Option(help="configurations, comma-separated, `stc*`; dense always runs")
    ] = "*",
    rate: Annotated[float, typer.Option(help="server learning rate")] = 1.0,
    momentum: Annotated[float, typer.Option(help="server momentum")] = 0.0,
    rounds: Annotated[int | None, typer.Option(min=1, help="rounds of a run; else the setting's")] = None,
    data: Annotated[str | None, typer.Option(help="source of samples for a single setting")] = None,
    steps: Annotated[
        bool, typer.Option(help="also measure every encoding and NNCodec on single updates of a CNN")
    ] = False,
) -> None:
    """Count the bytes up to 90, 95 and 99 % of dense FedAvg's final accuracy."""
    with one_line_errors("benchmarks.wire"):
        from rich.console import Console

        from benchmarks.wire.all_runs import Wanted, run_all

        run_all(Wanted(out, settings, seeds, only, rate, momentum, rounds, data, steps), Console())


if __name__ == "__main__":
    app()
