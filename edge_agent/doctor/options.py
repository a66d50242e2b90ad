"""The options of one command for another, so that a line for `run` becomes one for `doctor` by one word."""

import inspect
from collections.abc import Callable
from typing import Any


def same_options(as_in: Callable[..., Any], but: tuple[str, ...] = ()) -> Callable[..., Any]:
    """Decorate `command(options, **own)` to take every option of `as_in` but these, none of them required.

    The options arrive as a mapping by name, the command's own parameters as they are.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        asked = [
            one.replace(default=None if one.default is one.empty else one.default)
            for name, one in inspect.signature(as_in, eval_str=True).parameters.items()
            if name not in but
        ]
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

        def call(**given: Any) -> None:
            mine = {one.name: given.pop(one.name) for one in own}
            command(given, **mine)

        call.__name__, call.__doc__ = command.__name__, command.__doc__
        parameters = [one.replace(kind=one.KEYWORD_ONLY) for one in (*asked, *own)]
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return call

    return decorate
