"""edge-agent try: shows the first samples of a source, their statistics, and what would be refused."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from fleetune.edge_agent.run_options import LabelColumns
from fleetune.edge_agent.state.defaults import TEST_FRACTION
from fleetune.protocols.one_line import one_line_errors

if TYPE_CHECKING:
    from fleetune.edge_agent.doctor.data_trial import Trial

SECONDS = 10.0


def try_data(
    data: Annotated[str, typer.Option(help="the --data of edge-agent run")],
    label_column: LabelColumns = "label",
    test_fraction: Annotated[
        float, typer.Option(min=0.01, max=0.99, help="the --test-fraction of edge-agent run")
    ] = TEST_FRACTION,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=3600, help="longest time to wait for samples of a stream")
    ] = SECONDS,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, for scripts")] = False,
) -> None:
    """Show the first samples of a data source, their shape and statistics, and what would be refused.

    Nothing is stored.
    """
    from fleetune.edge_agent.doctor.data_trial import try_source

    with one_line_errors("edge-agent"), _errors_only():
        labels = tuple(one.strip() for one in label_column.split(",") if one.strip())
        found = try_source(data, labels, test_fraction, seconds)
    if as_json:
        print(json.dumps(found.as_dict()))
    else:
        _show(found)
    if not found.num_samples:
        raise typer.Exit(1)


@contextmanager
def _errors_only() -> Iterator[None]:
    """Log errors only: what is refused is shown as a result."""
    logger = logging.getLogger("fleetune")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _show(found: "Trial") -> None:
    import rich
    from rich.table import Table
    from rich.text import Text

    shape = " x ".join(map(str, found.shape))
    if found.num_samples:
        first = "the first " if found.stream else ""
        print(f"{found.source}: {first}{found.num_samples:,} samples of {shape} ({found.dtype})")
        print(f"{found.labels}; {found.train:,} to train on, {found.test:,} to test on")
        table = Table("input", "mean", "std", "min", "max")
        for one in found.columns:
            table.add_row(
                Text(one.name), *(f"{value:.4g}" for value in (one.mean, one.std, one.min, one.max))
            )
        rich.print(table)
    for place, sample in enumerate(found.first, 1):
        x = json.dumps(sample["x"])
        print(f"sample {place}: {x if len(x) <= 100 else x[:97] + '...'}, label {sample['y']}")
    for kind, (count, last) in found.refused.items():
        print(f"refused, {kind}: {count:,}, last: {last}")
    for hint in found.hints:
        print(f"hint: {hint}")
    if not found.num_samples:
        remedy = (
            "see above" if found.refused else "wait longer with --seconds, or check the path and the sensor"
        )
        print(f"{found.source}: no sample; {remedy}")
