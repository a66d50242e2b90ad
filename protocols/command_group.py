"""Groups of commands: one hides URLs, which may hold a password; one has a command that needs no name."""

from typing import Any

import typer
from typer.core import TyperGroup

from fleetune.protocols.one_line import without_url

# Some releases of typer bundle their own click; BadParameter derives from its UsageError.
UsageError: Any = typer.BadParameter.__mro__[1]


class Commands(TyperGroup):
    """The commands of one program (`typer.Typer(cls=Commands)`)."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command; error messages about its command line lose what follows `://`."""
        try:
            return super().invoke(ctx)
        except UsageError as problem:
            problem.message = without_url(problem.message)
            raise


class RunByDefault(TyperGroup):
    """A group whose command `run` needs no name: `service FOLDER` is `service run FOLDER`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["run", *args]
        found: list[str] = super().parse_args(ctx, args)
        return found
