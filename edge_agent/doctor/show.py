"""Prints check results, for people one by one or for scripts as JSON."""

from collections.abc import Iterable, Iterator

import msgspec
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


def as_json(results: Iterable[CheckResult]) -> bytes:
    """JSON of the form `{"ok": ..., "results": [{"verdict", "what", "found", "remedy"}, ...]}`."""
    seen = list(results)
    return msgspec.json.format(msgspec.json.encode({"ok": is_well(seen), "results": seen}), indent=2)


def is_well(results: Iterable[CheckResult]) -> bool:
    """True if no check failed."""
    return all(result.verdict != "fail" for result in results)


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
        return Text(f"{failed} failed, {warned} warnings", "bold red")
    return Text(f"nothing failed, {warned} warnings" if warned else "all is well", "green")
