"""Command groups whose error messages show no URL, because a URL may hold a password."""

from typing import Any

import typer
from typer.core import TyperGroup

from fleetune.protocols.one_line import without_url

# Some releases of typer bundle their own click; BadParameter derives from its UsageError.
_UsageError: Any = typer.BadParameter.__mro__[1]


class Commands(TyperGroup):
    """The commands of one program (`typer.Typer(cls=Commands)`)."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command; error messages about its command line lose what follows `://`."""
        try:
            return super().invoke(ctx)
        except _UsageError as problem:
            problem.message = without_url(problem.message)
            raise
