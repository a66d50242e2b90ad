"""Finds the files that a source names: one file, the files of a folder, or those that match a pattern."""

import glob
import os
from collections.abc import Iterator
from pathlib import Path

from fleetune.protocols.errors import DataError

ENDINGS = (".csv", ".csv.gz")
UNFINISHED = (".tmp", ".part", ".new", ".swp", "~")


def exists(path: Path) -> bool:
    """True if there is such a file or folder, or a file that matches a pattern."""
    return path.exists() or (is_pattern(path) and bool(_matches(path)))


def is_pattern(path: Path) -> bool:
    """True if a path is a pattern such as logs/*.csv, and no file has this name."""
    return glob.has_magic(str(path)) and not path.exists()


def files_of(path: Path) -> Iterator[Path]:
    """Yield the files that a path names, in the order of their names; not hidden and unfinished ones."""
    if is_pattern(path):
        yield from filter(_is_complete, _matches(path))
    elif path.is_dir():
        for where, folders, files in os.walk(path):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            yield from (one for name in sorted(files) if _is_complete(one := Path(where, name)))
    else:
        yield path


def base_folder(path: Path) -> Path:
    """Return the folder itself, or the folder above the first part of a pattern that has a wildcard."""
    if not is_pattern(path):
        return path.parent if path.is_file() else path
    parts = path.parts
    first = next(place for place, part in enumerate(parts) if glob.has_magic(part))
    return Path(*parts[:first])


def _matches(pattern: Path) -> list[Path]:
    return sorted(map(Path, glob.glob(str(pattern), recursive=True)))  # noqa: PTH207 - it may be absolute


def _is_complete(path: Path) -> bool:
    return not path.name.startswith(".") and not path.name.endswith(UNFINISHED) and not path.is_dir()


def csv_files(source: str, path: Path) -> list[Path]:
    """Return the CSV files that a path names, of a folder those with content.

    Raises DataError if there are none.
    """
    if not is_pattern(path) and not path.is_dir():
        return [path]
    named = (one for one in files_of(path) if one.name.lower().endswith(ENDINGS))
    found = [one for one in named if one.stat().st_size]  # a logger may just have begun one
    if not found:
        raise DataError(
            f"{source}: no file in {path} ends in .csv or .csv.gz and has content; check the path"
        )
    return found
