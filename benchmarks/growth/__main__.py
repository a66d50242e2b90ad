"""Cost of a simulated round with more devices, participants or parameters.

    python -m benchmarks.growth --out growth
    python -m benchmarks.growth --out growth --only devices --most 1000000

Each finished run is a file in OUT/runs, and the same command resumes after a stop.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleetune.protocols.errors import SettingError
from fleetune.protocols.one_line import one_line_errors

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
SUMMING = "summing"
_KNOWN = ("devices", "participants", "parameters", SUMMING)


@app.command()
def growth(
    out: Annotated[Path, typer.Option(help="folder of runs, tables and a picture")] = Path("growth"),
    only: Annotated[str, typer.Option(help=f"comma-separated: {', '.join(_KNOWN)}")] = ",".join(_KNOWN),
    most: Annotated[int, typer.Option(min=1, help="largest value to run")] = 10**7,
    workers: Annotated[int | None, typer.Option(help="training processes; else one for each core")] = None,
) -> None:
    """Measure seconds, processor time and memory of a round for growing fleets and models."""
    with one_line_errors("benchmarks.growth"):
        from rich.console import Console

        for name in (wanted := only.split(",")):
            if name not in _KNOWN:
                raise SettingError(f"--only {name}: unknown; known: {', '.join(_KNOWN)}")
        _run_all(out, wanted, most, os.cpu_count() or 1 if workers is None else workers, Console())


def _run_all(out: Path, wanted: list[str], most: int, workers: int, console: "Console") -> None:
    from benchmarks.growth.report import write_results
    from benchmarks.growth.runs import AXES, Run, run, save, saved
    from benchmarks.growth.summing import DENSITY, summed
    from benchmarks.process_usage import machine

    runs: dict[str, list[Run]] = {}
    for name in (one for one in wanted if one != SUMMING):
        for value in (one for one in AXES[name].values if one <= most):
            path = out / "runs" / f"{name}-{value}.json"
            found = saved(path)
            if found is None:
                with console.status(f"{value:,} {name}"):
                    found = run(AXES[name], value, workers)
                save(found, path)
            console.print(f"{value:,} {name}: {found.round_s:.3f} s a round", highlight=False)
            runs.setdefault(name, []).append(found)
    sizes = [size for size in (10**5, 10**6, 10**7) if size <= most] if SUMMING in wanted else []
    found_sums = [summed(size, density) for size in sizes for density in (DENSITY, 1.0)]
    out.mkdir(parents=True, exist_ok=True)
    text = write_results(runs, found_sums, machine(), out)
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(f"  {out / 'results.md'}", soft_wrap=True)


if __name__ == "__main__":
    app()
