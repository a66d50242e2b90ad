"""Generated pages and tables are up to date with the code and with the result files."""

import msgspec
import pytest
from tests.helpers.places import ROOT

from fleetune.tools.docs.pages import PAGES
from fleetune.tools.docs.result_tables import (
    UNKNOWN,
    Results,
    page_with_tables,
    pages_with_tables,
    read_results,
    table,
)


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_that_of_the_code(name):
    written = (ROOT / name).read_text(encoding="utf-8")
    assert written == PAGES[name](ROOT), f"{name} is old: python -m fleetune.tools.docs"


@pytest.mark.parametrize("name", pages_with_tables(ROOT))
def test_the_tables_of_a_page_are_those_of_its_result_files(name):
    written = (ROOT / name).read_text(encoding="utf-8")
    assert written == page_with_tables(ROOT, name), f"{name} is old: python -m fleetune.tools.docs"


def test_every_result_file_is_shown_on_a_page():
    pages = "".join((ROOT / name).read_text(encoding="utf-8") for name in pages_with_tables(ROOT))
    folder = ROOT / "docs" / "results"
    files = {str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.json")}
    assert {name for name in files if f"<!-- results: {name} -->" not in pages} == set()


def test_a_table_shows_values_and_how_to_repeat_them():
    results = Results(
        ("method", "%"), (("fedavg", 94.5), ("fedspu", None)), "edge-sim run x", "abc", "2026-11", (0, 1)
    )
    shown = table(results)
    assert shown.startswith(f"| method | % |\n| --- | ---: |\n| fedavg | 94.5 |\n| fedspu | {UNKNOWN} |\n")
    assert shown.endswith(
        "Seeds 0, 1. Measured on 2026-11 at commit abc. Repeat with:\n\n```\nedge-sim run x\n```"
    )


def test_a_row_of_another_length_is_named(tmp_path):
    path = tmp_path / "x.json"
    path.write_bytes(msgspec.json.encode({"columns": ["a", "b"], "rows": [[1, 2], [3]]}))
    with pytest.raises(ValueError, match="row 2"):
        read_results(path)
