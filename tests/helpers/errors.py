"""Expect an error by its type and by what its line names, so that messages can be reworded."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fleetune.protocols.errors import FleetuneError, said_and_remedy


@contextmanager
def raises(
    expected: type[Exception], *named: str, remedy: tuple[str, ...] | str = ()
) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect exactly one error of the type, whose line names each of `named`.

    Args:
        named: keys, files, rows, devices or values: what a user searches for, never a phrase.
        remedy: settings, options or commands that the part after the semicolon names.
    """
    with pytest.raises(expected) as caught:
        yield caught
    line = str(caught.value)
    if issubclass(expected, FleetuneError):
        assert "\n" not in line, f"more than one line: {line}"
    missing = [one for one in named if one not in line]
    assert not missing, f"{missing} not named in: {line}"
    wanted = (remedy,) if isinstance(remedy, str) else remedy
    unnamed = [one for one in wanted if one not in said_and_remedy(line)[1]]
    assert not unnamed, f"{unnamed} not named in the remedy of: {line}"
