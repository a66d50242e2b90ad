"""Prints the results of the checks."""

from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.text import Text

from fleetune.edge_agent.doctor.check_result import CheckResult

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}
_INDENT = " " * 6


def show(results: Iterable[CheckResult], console: Console) -> list[CheckResult]:
    """Print each result and its remedy as it comes, and return all results."""
    seen = []
    for result in results:
        for line in _lines(result):
            console.print(line, soft_wrap=True)
        seen.append(result)
    console.print(_summary(seen))
    return seen


def _lines(result: CheckResult) -> Iterator[Text]:
    yield Text.assemble(
        (f"{result.verdict:<{len(_INDENT)}}", _STYLES[result.verdict]), f"{result.what}: {result.found}"
    )
    if result.remedy:
        yield Text(f"{_INDENT}-> {result.remedy}")


def _summary(results: list[CheckResult]) -> Text:
    verdicts = [result.verdict for result in results]
    failed, warned = verdicts.count("fail"), verdicts.count("warn")
    if failed:
        return Text(f"failed checks: {failed}, warnings: {warned}", "bold red")
    return Text(f"no check failed, warnings: {warned}" if warned else "no check failed", "green")
