"""`edge-sim bench wire`: what encodings cost and lose, and how many bytes up a fleet needs until it is good.

    edge-sim bench wire --out wire --seeds 3
    edge-sim bench wire --out wire --settings har --only "dense,stc*,sparse*"
    edge-sim bench wire --out wire --settings none --steps
    edge-sim bench wire --out wire --settings fashion-0.5 --data idx:fashion-mnist --only sparse-50 --rate 0.5

Every finished run is a file in OUT/runs; the same command goes on where it was stopped. The tables are of all
runs that are there, so that more contenders, seeds or steps of the coordinator can come later.
"""

from pathlib import Path
from typing import Annotated

import typer

from fleetune.protocols.one_line import one_line_errors


def wire(
    out: Annotated[Path, typer.Option(help="folder of finished runs, tables and plots")] = Path("wire"),
    settings: Annotated[
        str,
        typer.Option(
            help="comma-separated: har, fashion-0.5, fashion-0.1, fashion-iid, news, digits-spoken; none"
        ),
    ] = "har,fashion-0.5",
    seeds: Annotated[int, typer.Option(min=1, help="runs of each contender, seeds from 0")] = 3,
    only: Annotated[str, typer.Option(help="contenders, comma-separated, `stc*`; dense always runs")] = "*",
    rate: Annotated[float, typer.Option(help="how much of the averaged step the coordinator takes")] = 1.0,
    momentum: Annotated[float, typer.Option(help="of the coordinator")] = 0.0,
    rounds: Annotated[int | None, typer.Option(min=1, help="of a run, instead of the setting's")] = None,
    data: Annotated[
        str | None, typer.Option(help="source of the one setting's samples instead of its own")
    ] = None,
    steps: Annotated[
        bool, typer.Option(help="also weigh every encoding, and NNCodec, on single steps of a CNN")
    ] = False,
) -> None:
    """Bytes up to 90, 95 and 99 % of dense FedAvg's final accuracy, of encodings and published rivals."""
    with one_line_errors("edge-sim"):
        from rich.console import Console

        from fleetune.tools.bench.wire.play import Wanted, play

        play(Wanted(out, settings, seeds, only, rate, momentum, rounds, data, steps), Console())
