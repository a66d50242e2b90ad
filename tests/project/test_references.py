"""What docstrings and pages refer to is there: modules, names in them, and files of the repository."""

import re

import pytest
from tests.helpers.places import ROOT

FLOORS = ("protocols", "coordinator", "edge_agent", "firmware_profiles", "tools", "benchmarks", "tests")
_FLOOR = f"(?:{'|'.join(FLOORS)})"
DOTTED = re.compile(rf"`(?:fleetune\.)?({_FLOOR}(?:\.(?!py\b)\w+)+)(?:\(\))?`")
PATH = re.compile(rf"`({_FLOOR}(?:/[\w.-]+)+/?)`")


def texts(*suffixes):
    for folder in (*FLOORS, "docs", "examples"):
        paths = (path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in suffixes)
        yield from ((path.relative_to(ROOT), path.read_text(encoding="utf-8")) for path in paths)
    yield from ((path.relative_to(ROOT), path.read_text(encoding="utf-8")) for path in ROOT.glob("*.md"))


def is_there(dotted):
    """Whether there is such a module, or one of the first words with the next word in it."""
    words = dotted.split(".")
    for end in range(len(words), 0, -1):
        place = ROOT.joinpath(*words[:end])
        if place.is_dir() and end == len(words):
            return True
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.exists():
                rest = words[end : end + 1]
                return all(re.search(rf"\b{word}\b", file.read_text(encoding="utf-8")) for word in rest)
    return False


def test_modules_and_names_in_backticks_exist():
    found = {(str(path), name) for path, text in texts(".py", ".md") for name in DOTTED.findall(text)}
    assert len(found) > 100
    assert {(path, name) for path, name in found if not is_there(name)} == set()


def test_files_and_folders_in_backticks_exist():
    found = {(str(path), name) for path, text in texts(".py", ".md") for name in PATH.findall(text)}
    assert len(found) > 20
    assert {(path, name) for path, name in found if not (ROOT / name).exists()} == set()


@pytest.mark.parametrize("name", ["protocols.gone", "protocols.errors.Nothing", "tools.links.gone.links_of"])
def test_what_is_not_there_is_found(name):
    assert not is_there(name)
