"""Error output of all programs: a user's mistake is one stderr line and exit code 2, a fault one log line."""

import difflib
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from fleetune.protocols.errors import FleetuneError


def flat(words: object) -> str:
    """Return a text from another source without line breaks."""
    return " ".join(str(words).split())


def without_url(text: str) -> str:
    """Return `text` without what follows `://`, for messages, because a URL may contain a password."""
    head, mark, _ = text.partition("://")
    return f"{head}{mark}..." if mark else text


def mentions(text: str, name: str) -> bool:
    """True if a text contains a name as a whole word."""
    return re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text) is not None


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the known name that an unknown one resembles, or all known names, for an error message."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"


def unexpected(fault: BaseException) -> str:
    """Return an unexpected exception as one line for a log; its traceback goes to the debug log."""
    words = flat(fault)[:300]
    return f"unexpected {type(fault).__name__}" + (f" ({words})" if words else "")


@contextmanager
def one_line_errors(program: str) -> Iterator[None]:
    """End `program` with one line if the context raises a FleetuneError; other exceptions keep their
    traceback.
    """
    try:
        yield
    except FleetuneError as problem:
        print(f"{program}: {problem}", file=sys.stderr)
        raise SystemExit(2) from None
