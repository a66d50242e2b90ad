"""Whole tables of the papers as TOML files: methods and settings, each pair a cell, with the paper's number.

A cell is one of tools/papers with what differs; one that cannot be played says why.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from fleetune.protocols.errors import SettingError
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.tools.papers.cell_files import merged, read_variant
from fleetune.tools.papers.measures import MEASURES

TABLES = Path(__file__).parent / "tables"
Printed = float | tuple[float, float] | str


class TableMethod(Struct, frozen=True, forbid_unknown_fields=True):
    """A method of a table.

    Attributes:
        cell: of tools/papers.
        method: its [method] section instead of the cell's.
        lacks: why none of its cells can be played.
    """

    cell: str = ""
    method: dict[str, Any] = field(default_factory=dict)
    lacks: str = ""


class TableSetting(Struct, frozen=True, forbid_unknown_fields=True):
    """What all methods of a row or column have in common.

    Attributes:
        values: as printed, by method: a number, a number and its standard deviation, or words.
        change: what differs from the methods' own cells.
        of: of one method, what differs beside it.
        cells: of one method, the cell that this is, as it stands.
        lacks: why nothing of it can be played.
    """

    values: dict[str, Printed]
    change: dict[str, Any] = field(default_factory=dict)
    of: dict[str, dict[str, Any]] = field(default_factory=dict)
    cells: dict[str, str] = field(default_factory=dict)
    lacks: str = ""


class PaperTable(Struct, frozen=True, forbid_unknown_fields=True):
    """A table of a paper.

    Attributes:
        title: of which paper, which table, and of what.
        across: what stands across: the other stands down.
        methods, settings: by what the paper calls them, in its order.
    """

    title: str
    across: Literal["methods", "settings"]
    methods: dict[str, str | TableMethod]
    settings: dict[str, TableSetting]


class TableCell(Struct, frozen=True):
    """One number of a table.

    Attributes:
        name: its folder is called so; that of tools/papers where it is one of these as it stands.
        method, setting: whose.
        printed: as the paper has it.
        base: the cell of tools/papers that it is made of.
        own: what differs from that.
        lacks: why it cannot be played; "": it can.
    """

    name: str
    method: str
    setting: str
    printed: Printed
    base: str
    own: dict[str, Any]
    lacks: str

    def read(self, changes: Sequence[str] = ()) -> tuple[RunSettings, RunSettings]:
        """Its settings, and with `changes` (section.key=value) what is asked for.

        Raises:
            SettingError: a change is wrong.
        """
        plain, _ = read_variant(self.base, {}, self.name)
        assert plain.paper is not None
        own = self.own
        if own and not isinstance(self.printed, str):
            unit = MEASURES[own.get("paper", {}).get("accuracy", plain.paper.accuracy)].unit
            own = merged(own, {"paper": {"table": f"{plain.paper.table.partition(',')[0]}, {self.name}"}})
            own = merged(own, {"paper": _paper_value(self.printed, unit)})
        return read_variant(self.base, own, self.name, changes)


def table_names() -> list[str]:
    """All there are."""
    return sorted(file.stem for file in TABLES.glob("*.toml"))


def read_table(name: str) -> PaperTable:
    """A table by name.

    Raises:
        SettingError: there is none, or its file is wrong.
    """
    if name not in table_names():
        near = difflib.get_close_matches(name, table_names(), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(table_names())}"
        raise SettingError(f"no table {name!r}; {hint}")
    file = TABLES / f"{name}.toml"
    try:
        return msgspec.toml.decode(file.read_bytes(), type=PaperTable)
    except msgspec.MsgspecError as problem:
        raise SettingError(f"{file}: {problem}") from None


def cells_of_table(name: str, table: PaperTable) -> list[TableCell]:
    """All of its cells, setting by setting."""
    return [
        _cell(name, label, method if isinstance(method, TableMethod) else TableMethod(method), setting, of)
        for setting, of in table.settings.items()
        for label, method in table.methods.items()
        if label in of.values
    ]


def _cell(table: str, label: str, method: TableMethod, setting: str, of: TableSetting) -> TableCell:
    printed, lacks = of.values[label], of.lacks or method.lacks
    if label in of.cells:
        return TableCell(of.cells[label], label, setting, printed, of.cells[label], {}, lacks)
    own = merged({"method": method.method} if method.method else {}, of.change)
    own = merged(own, of.of.get(label, {}))
    name = f"{table}-{_slug(setting)}-{_slug(label)}" if own or lacks else method.cell
    return TableCell(name, label, setting, printed, method.cell, own, lacks)


def _paper_value(printed: float | tuple[float, float], unit: str) -> Mapping[str, float]:
    scale = 0.01 if unit == "%" else 1.0
    if isinstance(printed, tuple):
        return {"value": round(scale * printed[0], 6), "deviation": round(scale * printed[1], 6)}
    return {"value": round(scale * printed, 6)}


def _slug(text: str) -> str:
    plain = text.replace("↑", "up").replace("↓", "down").replace(".", "")
    return re.sub(r"[^a-z0-9]+", "-", plain.lower()).strip("-")
