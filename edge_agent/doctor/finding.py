"""What a check found, and the fence around every check: one that fails itself hides none of the others."""

from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from msgspec import Struct

from fleetune.protocols.errors import FleetuneError

Verdict = Literal["ok", "warn", "fail", "skip"]


class Finding(Struct, frozen=True):
    """One line of a diagnosis.

    Attributes:
        verdict: "fail": an agent would not work; "skip": it was not looked at.
        what: was looked at.
        found: what was found there.
        mend: what to do about it; "" if nothing needs it.
    """

    verdict: Verdict
    what: str
    found: str
    mend: str = ""


Check = Callable[[], Iterable[Finding]]


def fenced(what: str, check: Check) -> Iterator[Finding]:
    """Everything that `check` finds; whatever it raises becomes a finding too."""
    try:
        yield from check()
    except FleetuneError as problem:
        yield refused(what, problem)
    except (Exception, SystemExit) as problem:  # noqa: BLE001 - a user's data source may raise anything
        found = f"the check itself failed: {type(problem).__name__}: {problem}"
        yield Finding("fail", what, _one_line(found), "report this, with the line of command")


def refused(what: str, problem: FleetuneError) -> Finding:
    """One of our errors as a finding: it says what is wrong and, mostly after a semicolon, what to do."""
    found, _, advice = str(problem).partition("; ")
    return Finding("fail", what, _one_line(found), _one_line(advice) or "correct it; edge-agent run --help")


def _one_line(text: str) -> str:
    return " ".join(text.split())
