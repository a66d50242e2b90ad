"""docs/map.md tells the truth about the tree: every file stands there with its purpose, none that is gone."""

from tests.helpers.places import ROOT

from fleetune.tools.file_map import MAP, file_map


def test_the_map_is_that_of_the_tree():
    written = (ROOT / MAP).read_text(encoding="utf-8")
    assert written == file_map(ROOT), "files or docstrings have changed: run `make docs`"
