"""docs/map.md: every file with the first sentence of its docstring."""

import ast
from collections.abc import Iterator
from pathlib import Path

from fleetune.tools.docs import docstrings

FOLDERS = ("protocols", "coordinator", "edge_agent", "firmware_profiles", "tools", "tests")
_HEAD = """# What is where

Each file with the first sentence of its docstring. Made by `make docs`; a test holds it against the tree.
"""


def file_map(root: Path) -> str:
    """The map of the tree below `root`, as Markdown.

    Raises:
        ValueError: a file has no docstring.
    """
    return "\n".join([_HEAD, *(line for folder in FOLDERS for line in _room(root, root / folder))]) + "\n"


def _room(root: Path, folder: Path) -> Iterator[str]:
    """A folder's files, then those of the folders in it."""
    found = sorted(path for path in folder.glob("*.py") if path.read_text(encoding="utf-8"))
    if found:
        yield f"## {folder.relative_to(root)}/\n"
        yield from (f"- `{path.name}`: {first_sentence(path)}" for path in found)
        yield ""
    for inner in sorted(path for path in folder.iterdir() if path.is_dir()):
        yield from _room(root, inner)


def first_sentence(path: Path) -> str:
    """Of the file's docstring, on one line. Raises ValueError: it has none."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if not text:
        raise ValueError(f"{path} has no docstring: its first line says what the file is for")
    return docstrings.first_sentence(text)
