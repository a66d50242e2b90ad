"""Result of a check, and the function that runs checks: a check that fails itself hides none of the
others.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from msgspec import Struct

from fleetune.protocols.errors import FleetuneError

Verdict = Literal["ok", "warn", "fail", "skip"]


class CheckResult(Struct, frozen=True):
    """One line of a diagnosis.

    Attributes:
        verdict: "fail": an agent would not work; "skip": not checked.
        what: subject of the check.
        found: what the check found.
        remedy: what to do about it, or "".
    """

    verdict: Verdict
    what: str
    found: str
    remedy: str = ""


Check = Callable[[], Iterable[CheckResult]]


def run_check(what: str, check: Check) -> Iterator[CheckResult]:
    """Yield the results of `check`. An exception becomes a result too."""
    try:
        yield from check()
    except FleetuneError as problem:
        yield refused(what, problem)
    except (Exception, SystemExit) as problem:  # noqa: BLE001 - a user's data source may raise anything
        found = f"the check itself failed: {type(problem).__name__}: {problem}"
        yield CheckResult("fail", what, _one_line(found), "report this with the full command line")


def refused(what: str, problem: FleetuneError) -> CheckResult:
    """A result with an error's message and remedy."""
    found, remedy = _one_line(problem.found), _one_line(problem.remedy)
    return CheckResult("fail", what, found, remedy or "correct this setting; see edge-agent run --help")


def _one_line(text: str) -> str:
    return " ".join(text.split())
