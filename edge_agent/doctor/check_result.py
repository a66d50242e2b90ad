"""The result of a check. A check that fails itself hides none of the others."""

from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from msgspec import Struct

from fleetune.protocols.errors import FleetuneError

Verdict = Literal["ok", "warn", "fail", "skip"]


class CheckResult(Struct, frozen=True):
    """One line of a diagnosis.

    Attributes:
        verdict: "fail": an agent would not work; "skip": it was not checked.
        what: was checked.
        found: what the check found.
        remedy: what to do about it; "": nothing.
    """

    verdict: Verdict
    what: str
    found: str
    remedy: str = ""


Check = Callable[[], Iterable[CheckResult]]


def run_check(what: str, check: Check) -> Iterator[CheckResult]:
    """The results of `check`; an exception of it becomes a result too."""
    try:
        yield from check()
    except FleetuneError as problem:
        yield refused(what, problem)
    except (Exception, SystemExit) as problem:  # noqa: BLE001 - a user's data source may raise anything
        found = f"the check itself failed: {type(problem).__name__}: {problem}"
        yield CheckResult("fail", what, _one_line(found), "report this, with the line of command")


def refused(what: str, problem: FleetuneError) -> CheckResult:
    """One of our errors as a result, with its remedy."""
    found, remedy = _one_line(problem.found), _one_line(problem.remedy)
    return CheckResult("fail", what, found, remedy or "correct it; edge-agent run --help")


def _one_line(text: str) -> str:
    return " ".join(text.split())
