"""The result of a check, and the function that runs a check and turns its errors into results."""

from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from msgspec import Struct

from fleetune.protocols.errors import FleetuneError

Verdict = Literal["ok", "warn", "fail", "skip"]


class CheckResult(Struct, frozen=True):
    """One line of a diagnosis.

    Attributes:
        verdict: "ok", "warn", "fail" (an agent would not work) or "skip" (not checked).
        what: subject of the check.
        found: what the check found.
        remedy: what the user can do about it; empty if there is nothing to do.
    """

    verdict: Verdict
    what: str
    found: str
    remedy: str = ""


Check = Callable[[], Iterable[CheckResult]]


def run_check(what: str, check: Check) -> Iterator[CheckResult]:
    """Yield the results of `check`; an error in it is yielded as a failed result."""
    try:
        yield from check()
    except FleetuneError as problem:
        yield refused(what, problem)
    except (Exception, SystemExit) as problem:  # noqa: BLE001 - a user's data source may raise anything
        found = f"this check ended with {type(problem).__name__}: {problem}"
        remedy = (
            "if your own data source raised this error, correct it; otherwise report it with the full"
            " command line"
        )
        yield CheckResult("fail", what, _one_line(found), remedy)


def refused(what: str, problem: FleetuneError) -> CheckResult:
    """Return a failed result with an error's message and remedy."""
    found, remedy = _one_line(problem.found), _one_line(problem.remedy)
    return CheckResult("fail", what, found, remedy or "correct this setting; see edge-agent run --help")


def _one_line(text: str) -> str:
    return " ".join(text.split())
