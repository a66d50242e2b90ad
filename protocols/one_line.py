"""A user's mistake is one line on stderr and exit code 2, in every program; a fault one line in a log."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from fleetune.protocols.errors import FleetuneError


def flat(words: object) -> str:
    """What another wrote, without its line breaks."""
    return " ".join(str(words).split())


def without_url(text: str) -> str:
    """`text` with what follows `://` left out, for messages: a URL may hold a password."""
    head, mark, _ = text.partition("://")
    return f"{head}{mark}..." if mark else text


def unexpected(fault: BaseException) -> str:
    """What went wrong that nobody foresaw, in one line for a log; its traceback is for the debug log."""
    words = flat(fault)[:300]
    return f"unexpected {type(fault).__name__}" + (f" ({words})" if words else "")


@contextmanager
def one_line_errors(program: str) -> Iterator[None]:
    """What was raised on purpose inside ends `program` with its line; a fault of ours keeps its traceback."""
    try:
        yield
    except FleetuneError as problem:
        print(f"{program}: {problem}", file=sys.stderr)
        raise SystemExit(2) from None
