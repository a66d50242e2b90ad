"""Findings as they are shown: to people one by one as they come, to scripts as JSON."""

from collections.abc import Iterable, Iterator

import msgspec
from rich.console import Console
from rich.text import Text

from fleetune.edge_agent.doctor.finding import Finding

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}
_INDENT = " " * 6


def show(findings: Iterable[Finding], console: Console) -> list[Finding]:
    """Print a line for each finding as it comes, and a line on how to mend it; return all of them."""
    seen = []
    for finding in findings:
        for line in _lines(finding):
            console.print(line, soft_wrap=True)
        seen.append(finding)
    console.print(_summary(seen))
    return seen


def as_json(findings: Iterable[Finding]) -> bytes:
    """The findings as `{"ok": ..., "findings": [{"verdict", "what", "found", "mend"}, ...]}`."""
    seen = list(findings)
    return msgspec.json.format(msgspec.json.encode({"ok": is_well(seen), "findings": seen}), indent=2)


def is_well(findings: Iterable[Finding]) -> bool:
    """Whether nothing failed."""
    return all(finding.verdict != "fail" for finding in findings)


def _lines(finding: Finding) -> Iterator[Text]:
    yield Text.assemble(
        (f"{finding.verdict:<{len(_INDENT)}}", _STYLES[finding.verdict]), f"{finding.what}: {finding.found}"
    )
    if finding.mend:
        yield Text(f"{_INDENT}-> {finding.mend}")


def _summary(findings: list[Finding]) -> Text:
    verdicts = [finding.verdict for finding in findings]
    failed, warned = verdicts.count("fail"), verdicts.count("warn")
    if failed:
        return Text(f"{failed} failed, {warned} to look at", "bold red")
    return Text(f"nothing failed, {warned} to look at" if warned else "all is well", "green")
