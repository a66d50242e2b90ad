"""Walls that import-linter cannot see: how long a function may be, and where tests lie.

Who may import whom stands in pyproject.toml, `[tool.importlinter]`.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from tests.helpers.places import ROOT

FLOORS = ("protocols", "coordinator", "edge_agent", "firmware_profiles", "tools")
PRODUCT = (*FLOORS, "benchmarks", "examples")
MAX_FUNCTION_LINES = 60
NOT_ROOMS = {
    "arm64",
    "benchmarks",
    "fleet",
    "fuzz",
    "helpers",
    "project",
    "wire",
    "zoo",
}  # below tests/: of the project as a whole
TESTED_ELSEWHERE = {
    "protocols/method",  # in tests/protocols/methods, by every method
    "protocols/settings",  # in tests/protocols
}


def python_files(*folders: str) -> Iterator[Path]:
    """Below these folders of the repository, relative to it."""
    for folder in folders:
        yield from (path.relative_to(ROOT) for path in sorted((ROOT / folder).rglob("*.py")))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Each with its number of lines: decorators and signature count, its docstring does not."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            first = node.body[0]
            spoken = first.end_lineno - first.lineno + 1 if ast.get_docstring(node) else 0
            yield node.name, node.end_lineno - start + 1 - spoken


def imported(path: Path) -> Iterator[str]:
    """Names of modules as `import` statements have them."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            yield node.module


def rooms(floor: str, below: str = "") -> set[str]:
    """Folders with Python files in them one level down, as `floor/room`."""
    found = {path.parent for path in python_files(f"{below}{floor}")}
    parts = {path.relative_to(below).parts[:2] for path in found if path.is_relative_to(below)}
    return {"/".join(names) for names in parts if len(names) == 2}


def test_no_function_is_too_long():
    found = {f"{path}: {name}": num for path in python_files(*PRODUCT) for name, num in functions(path)}
    assert {name: num for name, num in found.items() if num > MAX_FUNCTION_LINES} == {}


def test_every_room_says_what_belongs_in_it():
    folders = {path.parent for path in python_files(*FLOORS, "benchmarks")}
    silent = {folder for folder in folders if not (ROOT / folder / "__init__.py").exists()}
    silent |= {folder for folder in folders - silent if not ast.get_docstring(tree(folder / "__init__.py"))}
    assert silent == set()


@pytest.mark.parametrize("folder", [*PRODUCT, "tests"])
def test_what_is_ours_is_imported_as_fleetune(folder):
    """A user's own `tools` or `protocols` would be taken for ours, and ours would be loaded twice."""
    bare = {(str(path), name) for path in python_files(folder) for name in imported(path)}
    assert {(path, name) for path, name in bare if name.split(".")[0] in FLOORS} == set()


@pytest.mark.parametrize("floor", FLOORS)
def test_tests_lie_as_what_they_test(floor):
    tested = rooms(floor, below="tests/")
    assert tested - rooms(floor) == set(), "tests of a room that is not there"
    assert rooms(floor) - tested == {room for room in TESTED_ELSEWHERE if room.startswith(floor)}


def test_every_folder_of_tests_is_a_floors_or_the_projects():
    folders = {path.parts[1] for path in python_files("tests") if len(path.parts) > 2}
    assert folders - {*FLOORS} == NOT_ROOMS
