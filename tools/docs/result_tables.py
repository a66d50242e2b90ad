"""Tables of measured results in docs/*.md, written from docs/results/*.json.

Two lines of a page mark a table: `<!-- results: NAME -->` and `<!-- end of results -->`. The command
`python -m fleetune.tools.docs` writes the text between them from docs/results/NAME.json.
"""

import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

UNKNOWN = "–"  # noqa: RUF001 - as reports show it
_PLACE = re.compile(r"<!-- results: (?P<name>[\w./-]+) -->\n(?:.*?\n)??<!-- end of results -->", re.DOTALL)


class Results(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measured values and their origin.

    Attributes:
        columns: the table's header.
        rows: the table's cells, one list for each row; numbers are shown unchanged.
        repeat: the command that repeats the measurement; several commands are several lines.
        commit: commit of the measurement; "" if unknown.
        date: date of the measurement as YYYY-MM-DD or YYYY-MM; "" if unknown.
        seeds: seeds of the runs.
        note: further facts for a reader: machine, data, settings.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str | int | float | None, ...], ...]
    repeat: str = ""
    commit: str = ""
    date: str = ""
    seeds: tuple[int, ...] = ()
    note: str = ""


def read_results(path: Path) -> Results:
    """Read results from a file. Raises ValueError: the file is not valid, or a row has too few or too many
    cells.
    """
    results = msgspec.json.decode(path.read_bytes(), type=Results)
    for number, row in enumerate(results.rows, 1):
        if len(row) != len(results.columns):
            raise ValueError(
                f"{path}: row {number} has {len(row)} cells, the header has {len(results.columns)}"
            )
    return results


def table(results: Results) -> str:
    """Return a Markdown table of the results, and one line on how to repeat them."""
    numeric = [
        all(isinstance(row[place], int | float) or row[place] is None for row in results.rows)
        for place in range(len(results.columns))
    ]
    lines = [
        _line(results.columns),
        _line("---:" if one else "---" for one in numeric),
        *(_line(UNKNOWN if cell is None else str(cell) for cell in row) for row in results.rows),
    ]
    return "\n".join(lines) + "\n\n" + _origin(results)


def page_with_tables(root: Path, page: str) -> str:
    """Return the text of a page with its tables rewritten from the present result files."""
    folder = root / "docs" / "results"

    def filled(place: re.Match[str]) -> str:
        shown = table(read_results(folder / f"{place['name']}.json"))
        return f"<!-- results: {place['name']} -->\n\n{shown}\n\n<!-- end of results -->"

    return _PLACE.sub(filled, (root / page).read_text(encoding="utf-8"))


def pages_with_tables(root: Path) -> list[str]:
    """Return the pages below docs/ with such tables, relative to `root`."""
    found = sorted((root / "docs").rglob("*.md"))
    return [
        str(path.relative_to(root)) for path in found if "<!-- results: " in path.read_text(encoding="utf-8")
    ]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _origin(results: Results) -> str:
    """Return the origin of the figures, and the commands that repeat them."""
    seeds = ", ".join(map(str, results.seeds))
    measured = [
        f"on {results.date}" if results.date else "",
        f"at commit {results.commit}" if results.commit else "",
    ]
    parts = [
        results.note,
        f"{'Seeds' if len(results.seeds) > 1 else 'Seed'} {seeds}." if seeds else "",
        f"Measured {' '.join(filter(None, measured))}." if any(measured) else "",
        f"Repeat with:\n\n```\n{results.repeat}\n```" if results.repeat else "",
    ]
    return " ".join(filter(None, parts))
