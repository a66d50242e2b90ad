"""`python -m benchmarks.robust`: what hostile devices do to a model, with each rule of `round.robust`.

    python -m benchmarks.robust --data DATA --stages first,default --runs runs/robust
    python -m benchmarks.robust --runs runs/robust --only-report

DATA is a folder with `fashion-mnist` and `uci_har`. Each finished run is a line of a file in RUNS. After
an interruption the same command continues. Several processes may share RUNS, each with its own `--part`.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.robust.cells import STAGES, Cell, cells
from fleetune.tools.stop_signals import in_one_line

RESULTS = "results*.jsonl"
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def robust(
    runs: Annotated[Path, typer.Option(help="where results are kept")] = Path("runs/robust"),
    data: Annotated[Path, typer.Option(help="folder with fashion-mnist and uci_har")] = Path("data"),
    stages: Annotated[str, typer.Option(help=f"comma-separated: {', '.join(STAGES)}")] = "first,default",
    part: Annotated[str, typer.Option(help="I/N: every N-th run, from the I-th on")] = "1/1",
    only_report: Annotated[bool, typer.Option(help="write the tables of the finished runs")] = False,
) -> None:
    """Run what is missing, then write tables and picture."""
    with in_one_line("benchmarks.robust"):
        runs.mkdir(parents=True, exist_ok=True)
        if not only_report:
            _play(runs, data, stages.split(","), *map(int, part.split("/")))
        from benchmarks.robust.report import write

        print(write(list(finished(runs)), runs))


def finished(runs: Path) -> Iterator[dict[str, Any]]:
    """Yield the figures of the finished runs."""
    for path in sorted(runs.glob(RESULTS)):
        yield from map(json.loads, path.read_text(encoding="utf-8").splitlines())


def _play(runs: Path, data: Path, stages: list[str], number: int, parts: int) -> None:
    import torch

    from benchmarks.robust.runs import played

    torch.set_num_threads(1)
    wanted = list(dict.fromkeys(cell for stage in stages for cell in cells(stage)))
    for cell in wanted[number - 1 :: parts]:
        if cell.name in {name_of(one) for one in finished(runs)}:
            continue
        began = time.monotonic()
        found = played(cell, data, runs)
        with (runs / f"results-{number}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
        scores = {key: found[key] for key in ("accuracy", "backdoor") if key in found}
        print(f"{cell.name} {scores} {time.monotonic() - began:.0f} s", flush=True)


def name_of(found: dict[str, Any]) -> str:
    """Return the name of a finished run's cell."""
    return Cell(**{key: found[key] for key in Cell.__dataclass_fields__}).name


if __name__ == "__main__":
    app()
