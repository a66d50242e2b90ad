"""A program's commands, whose messages about a wrong command line show no URL: it may hold a password."""

from typing import Any

import typer
from typer.core import TyperGroup

from fleetune.protocols.one_line import without_url

# Some releases of typer bring a click of their own; its UsageError is what their BadParameter derives from.
_UsageError: Any = typer.BadParameter.__mro__[1]


class Commands(TyperGroup):
    """Commands of one program (`typer.Typer(cls=Commands)`)."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command; a message about its command line loses what follows `://`."""
        try:
            return super().invoke(ctx)
        except _UsageError as problem:
            problem.message = without_url(problem.message)
            raise
