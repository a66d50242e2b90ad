"""Read the cells of the papers' tables by name.

Each file of tools/papers is a cell. Its `rows` are further cells.
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from fleetune.protocols.errors import SettingError
from fleetune.protocols.one_line import suggestion
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.run_toml import read_run
from fleetune.tools.papers.measures import MEASURES

CELLS = Path(__file__).parent
_FORMATS = ("idx", "cifar", "npz")
Content = dict[str, Any]


def read_cell(
    name: str, changes: Sequence[str] = (), data: str | None = None
) -> tuple[RunSettings, RunSettings]:
    """Return the settings of a cell: those of its file, and the same with the user's changes.

    Args:
        name: name of a cell of tools/papers, or a path to a file of the same form.
        changes: section.key=value each.
        data: the folder of the cell's files, or another source as in data.source.

    Raises:
        SettingError: there is no such cell, a change is wrong, or a change replaces [paper].
    """
    file, row = (Path(name), None) if name.endswith(".toml") else _place_of(name)
    adapt = None if row is None else _adapted(row)
    cell, asked = read_run(file, (), adapt), read_run(file, changes, adapt)
    if cell.paper is None or asked.paper != cell.paper:
        raise SettingError(f"{file}: a cell needs a [paper] table, and --set cannot change it")
    measure = MEASURES.get(cell.paper.accuracy)
    if measure is None:
        raise SettingError(
            f"{file}: paper.accuracy: {cell.paper.accuracy!r} is none of {', '.join(MEASURES)}"
        )
    if measure.unit == "%" and cell.paper.value > 1:
        raise SettingError(f"{file}: paper.value = {cell.paper.value:g}: expected a fraction, e.g. 0.9797")
    if asked.method["name"] != cell.method["name"]:
        raise SettingError(
            f"method.name: this cell is {cell.method['name']}'s; else: edge-sim compare {file} --methods ..."
        )
    if data is not None:
        kind = cell.data.source.partition(":")[0]
        source = data if data.partition(":")[0] in _FORMATS else f"{kind}:{data}"
        asked = replace(asked, data=replace(asked.data, source=source))
    return cell, asked


def read_variant(
    base: str, own: Mapping[str, Any], name: str, changes: Sequence[str] = ()
) -> tuple[RunSettings, RunSettings]:
    """Return the settings of a cell that is derived from another one, and the same with the user's changes.

    Args:
        base: name of a cell of tools/papers.
        own: the sections and keys that differ, in the form of `PaperSection.rows`.
        name: name of the new cell.
        changes: section.key=value each.

    Raises:
        SettingError: there is no such cell, or a change is wrong.
    """
    file, row = _place_of(base)
    adapt = _adapted(row, own, name)
    cell = read_run(file, (), adapt)
    return cell, read_run(file, changes, adapt) if changes else cell


def cell_names(pattern: str = "*") -> list[str]:
    """Return the names of the cells in tools/papers that match a pattern."""
    return sorted(name for name in _places() if fnmatch(name, pattern))


def _places() -> dict[str, tuple[Path, str | None]]:
    """Return the file and the row of each cell; the row is None if the cell is the file itself."""
    places: dict[str, tuple[Path, str | None]] = {}
    for file in CELLS.glob("*.toml"):
        places[file.stem] = file, None
        rows = tomllib.loads(file.read_text(encoding="utf-8"))["paper"].get("rows", {})
        places |= {row: (file, row) for row in rows}
    return places


def _place_of(name: str) -> tuple[Path, str | None]:
    places = _places()
    if name not in places:
        raise SettingError(f"no cell {name!r}; {suggestion(name, sorted(places)) or f'none in {CELLS}'}")
    return places[name]


def _adapted(
    row: str | None, own: Mapping[str, Any] | None = None, name: str = ""
) -> Callable[[Content], Content]:
    """Return a function that changes a file's content to that of one of its rows, then of a variant."""

    def adapt(content: Content) -> Content:
        if row is not None:
            content = _differing(content, content["paper"]["rows"][row], row)
        return content if own is None else _differing(content, own, name)

    return adapt


def _differing(content: Content, own: Mapping[str, Any], name: str) -> Content:
    """Return the content with the keys of `own`. A new method drops the old one's keys and open choices."""
    paper = dict(content["paper"])
    paper.pop("rows", None)
    if "value" in own.get("paper", {}):  # the cell's deviation belongs to the cell's value
        paper.pop("deviation", None)
    method = own.get("method", {})
    if method.get("name", content["method"]["name"]) != content["method"]["name"]:
        content = {**content, "method": {}}
        open_ = paper.get("open", {})
        paper["open"] = {key: why for key, why in open_.items() if not key.startswith("method.")}
    return merged(merged({**content, "paper": paper}, own), {"run": {"name": name}})


def merged(content: Mapping[str, Any], own: Mapping[str, Any]) -> Content:
    """Return a copy of `content` in which the keys of `own` replace its own, tables key by key."""
    both = dict(content)
    for key, value in own.items():
        old = both.get(key)
        tables = isinstance(old, dict) and isinstance(value, dict)
        both[key] = merged(old, value) if tables else value  # type: ignore[arg-type]
    return both
