"""The cells of tools/papers by name: each file one cell, and as many rows of the same table as it lists."""

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from fleetune.protocols.errors import SettingError
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.run_toml import read_run
from fleetune.tools.papers.measures import MEASURES

CELLS = Path(__file__).parent
_FORMATS = ("idx", "cifar", "npz")


def read_cell(
    name: str, changes: Sequence[str] = (), data: str | None = None
) -> tuple[RunSettings, RunSettings]:
    """A cell's settings as its file has them, and as asked for.

    Args:
        name: of a cell of tools/papers, or a path to a file like these.
        changes: section.key=value each.
        data: where the cell's files lie, or another source as in data.source.

    Raises:
        SettingError: there is no such cell, a change is wrong, or makes another paper's cell of it.
    """
    file, row = (Path(name), None) if name.endswith(".toml") else _place_of(name)
    adapt = None if row is None else partial(_as_row, row=row)
    cell, asked = read_run(file, (), adapt), read_run(file, changes, adapt)
    if cell.paper is None or asked.paper != cell.paper:
        raise SettingError(f"{file}: a cell needs a [paper] table, and --set cannot change it")
    measure = MEASURES.get(cell.paper.accuracy)
    if measure is None:
        raise SettingError(
            f"{file}: paper.accuracy: {cell.paper.accuracy!r} is none of {', '.join(MEASURES)}"
        )
    if measure.unit == "%" and cell.paper.value > 1:
        raise SettingError(f"{file}: paper.value: {cell.paper.value:g} is no fraction")
    if asked.method["name"] != cell.method["name"]:
        raise SettingError(
            f"method.name: this cell is {cell.method['name']}'s; else: edge-sim compare {file} --methods ..."
        )
    if data is not None:
        kind = cell.data.source.partition(":")[0]
        source = data if data.partition(":")[0] in _FORMATS else f"{kind}:{data}"
        asked = replace(asked, data=replace(asked.data, source=source))
    return cell, asked


def cell_names(pattern: str = "*") -> list[str]:
    """Of tools/papers, those that a pattern fits."""
    return sorted(name for name in _places() if fnmatch(name, pattern))


def _places() -> dict[str, tuple[Path, str | None]]:
    """Where each cell stands: its file, and the row of it; None: it is what the file itself is."""
    places: dict[str, tuple[Path, str | None]] = {}
    for file in CELLS.glob("*.toml"):
        places[file.stem] = file, None
        rows = tomllib.loads(file.read_text(encoding="utf-8"))["paper"].get("rows", {})
        places |= {row: (file, row) for row in rows}
    return places


def _place_of(name: str) -> tuple[Path, str | None]:
    places = _places()
    if name not in places:
        near = difflib.get_close_matches(name, sorted(places), n=1)
        known = ", ".join(sorted(places)) or f"none in {CELLS}"
        raise SettingError(f"no cell {name!r}; {f'did you mean {near[0]!r}?' if near else f'known: {known}'}")
    return places[name]


def read_variant(
    base: str, own: Mapping[str, Any], name: str, changes: Sequence[str] = ()
) -> tuple[RunSettings, RunSettings]:
    """A cell of tools/papers with what differs in another one of the same table, and this as asked for.

    Args:
        base: a cell's name.
        own: the sections and keys that differ, as of `PaperSection.rows`.
        name: of the cell that this makes.
        changes: section.key=value each.

    Raises:
        SettingError: there is no such cell, or a change is wrong.
    """
    file, row = _place_of(base)

    def adapt(content: dict[str, Any]) -> dict[str, Any]:
        as_base = content if row is None else _as_row(content, row)
        return _differing(as_base, own, name)

    cell = read_run(file, (), adapt)
    return cell, read_run(file, changes, adapt) if changes else cell


def _as_row(content: dict[str, Any], row: str) -> dict[str, Any]:
    """A file's content with what differs in a row."""
    return _differing(content, content["paper"]["rows"][row], row)


def _differing(content: dict[str, Any], own: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A cell's content with what differs in another; what a method that goes leaves open, goes with it."""
    paper = dict(content["paper"])
    paper.pop("rows", None)
    if "value" in own.get("paper", {}):  # the cell's deviation is that of the cell's value
        paper.pop("deviation", None)
    method = own.get("method", {})
    if method.get("name", content["method"]["name"]) != content["method"]["name"]:
        content = {**content, "method": {}}
        open_ = paper.get("open", {})
        paper["open"] = {key: why for key, why in open_.items() if not key.startswith("method.")}
    return merged(merged({**content, "paper": paper}, own), {"run": {"name": name}})


def merged(content: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """`content` with the keys of `own` in their place, tables key by key."""
    both = dict(content)
    for key, value in own.items():
        old = both.get(key)
        tables = isinstance(old, dict) and isinstance(value, dict)
        both[key] = merged(old, value) if tables else value  # type: ignore[arg-type]
    return both
