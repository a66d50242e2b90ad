"""python -m tests.arm64: an arm64 Debian on this machine, and an agent in it."""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from tests.arm64 import debian
from tests.arm64.enter import enter
from tests.arm64.install import install as install_in
from tests.arm64.processor import PROCESSORS

from fleetune.protocols.errors import SettingError
from fleetune.protocols.one_line import one_line_errors

app = typer.Typer(
    help="An arm64 Debian in a folder of this machine, and an agent that is installed there (Linux, root).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
console = Console()

Root = Annotated[Path, typer.Argument(help="folder of the arm64 system")]


@app.command()
def make(
    root: Root,
    suite: Annotated[str, typer.Option(help=" or ".join(debian.SUITES))] = debian.SUITES[0],
    mirror: Annotated[str, typer.Option(help="where Debian's packages are")] = debian.MIRROR,
) -> None:
    """Make the system, with Python: go on where an earlier try stopped, and leave a finished one as it is."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with (
        one_line_errors("tests.arm64"),
        Progress(*columns, TimeElapsedColumn(), TextColumn("{task.fields[words]}")) as bars,
    ):
        stages = {}
        for step in debian.make(root, suite, mirror):
            if step.stage not in stages:
                stages[step.stage] = bars.add_task(step.stage, words="")
            bars.update(stages[step.stage], completed=step.done, total=step.total, words=step.words[:24])
    console.print(f"{root} is ready: python -m tests.arm64 install {root}")


@app.command()
def install(
    root: Root,
    extras: Annotated[str, typer.Option(help="of pyproject.toml, with commas between")] = "onnx",
    others: Annotated[list[str], typer.Option("--with", help="another requirement for pip; may repeat")] = [],  # noqa: B006 - typer's way of saying it
) -> None:
    """Install this checkout, as a wheel, with pip; again after every change."""
    with one_line_errors("tests.arm64"):
        _check(root, made=debian.is_ready(root))
        install_in(root, extras, others)
    console.print(f"installed: python -m tests.arm64 run {root} -- edge-agent doctor")


@app.command(context_settings={"ignore_unknown_options": True})
def run(
    root: Root,
    words: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="what to run")],
    cpu: Annotated[str, typer.Option(help=", ".join(PROCESSORS))] = "max",
    share: Annotated[list[Path], typer.Option(help="folder of this machine to see inside; may repeat")] = [],  # noqa: B006 - typer's way of saying it
) -> None:
    """Run a command inside, on this machine's network; it starts in /root, as root."""
    with one_line_errors("tests.arm64"):
        _check(root, made=debian.is_unpacked(root))
        enter(root, words, cpu, share)


def _check(root: Path, *, made: bool) -> None:
    if os.geteuid() != 0:
        raise SettingError("an arm64 root can be entered by root only: sudo")
    if not made:
        raise SettingError(f"{root} is no finished arm64 root: python -m tests.arm64 make {root}")


if __name__ == "__main__":
    app(prog_name="python -m tests.arm64")
