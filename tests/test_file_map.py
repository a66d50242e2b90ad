"""docs/map.md tells the truth about the tree: every file stands there with its purpose, none that is gone."""

from pathlib import Path

from tools.file_map import MAP, file_map

ROOT = Path(__file__).parents[1]


def test_the_map_is_that_of_the_tree():
    written = (ROOT / MAP).read_text(encoding="utf-8")
    assert written == file_map(ROOT), "files or docstrings have changed: run `make docs`"
