"""Options of the commands `service install` and `service uninstall`."""

from pathlib import Path
from typing import Annotated

import typer

Into = Annotated[
    Path,
    typer.Option(help="root of another machine's file system, such as a mounted image; nothing is started"),
]
DryRun = Annotated[bool, typer.Option(help="only show what would be done")]
Purge = Annotated[bool, typer.Option(help="remove its settings too; its state folder always stays")]
