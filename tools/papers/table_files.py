"""Whole tables of the papers as TOML files: each pair of a method and a setting is a cell.

A cell is a cell of tools/papers with some changes. If it cannot be run, the file gives the reason.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from fleetune.protocols.errors import SettingError
from fleetune.protocols.one_line import suggestion
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.tools.papers.cells import merged, read_variant
from fleetune.tools.papers.measures import MEASURES, paper_of

TABLES = Path(__file__).parent / "tables"
Printed = float | tuple[float, float] | str


class TableMethod(Struct, frozen=True, forbid_unknown_fields=True):
    """A method of a table.

    Attributes:
        cell: its cell of tools/papers.
        method: [method] section that replaces the cell's.
        lacks: the reason why none of its cells can be run; "" if they can.
    """

    cell: str = ""
    method: dict[str, Any] = field(default_factory=dict)
    lacks: str = ""


class TableSetting(Struct, frozen=True, forbid_unknown_fields=True):
    """Settings that all methods of a row or a column share.

    Attributes:
        values: printed values by method: a number, a number and its standard deviation, or words.
        change: differences from the methods' own cells.
        of: further changes by method.
        cells: by method, the cell of tools/papers that is identical, without changes.
        lacks: the reason why none of its cells can be run; "" if they can.
    """

    values: dict[str, Printed]
    change: dict[str, Any] = field(default_factory=dict)
    of: dict[str, dict[str, Any]] = field(default_factory=dict)
    cells: dict[str, str] = field(default_factory=dict)
    lacks: str = ""


class PaperTable(Struct, frozen=True, forbid_unknown_fields=True):
    """A table of a paper.

    Attributes:
        title: the paper, its table, and the subject.
        across: `methods` if each column is a method, `settings` if each column is a setting.
        methods, settings: methods and settings by their names in the paper, in its order.
    """

    title: str
    across: Literal["methods", "settings"]
    methods: dict[str, str | TableMethod]
    settings: dict[str, TableSetting]


class TableCell(Struct, frozen=True):
    """One number of a table.

    Attributes:
        name: name of its folder; for an unchanged cell of tools/papers, that cell's name.
        method, setting: the cell's place in the table.
        printed: the value in the paper.
        base: the cell of tools/papers from which it is derived.
        own: the changes to that cell.
        lacks: the reason why it cannot be run; "" if it can.
    """

    name: str
    method: str
    setting: str
    printed: Printed
    base: str
    own: dict[str, Any]
    lacks: str

    def read(self, changes: Sequence[str] = ()) -> tuple[RunSettings, RunSettings]:
        """Return the settings of this cell, and the same with `changes` (section.key=value each).

        Raises:
            SettingError: a change is wrong.
        """
        plain, _ = read_variant(self.base, {}, self.name)
        paper, own = paper_of(plain), self.own
        if own and not isinstance(self.printed, str):
            unit = MEASURES[own.get("paper", {}).get("accuracy", paper.accuracy)].unit
            title = f"{paper.table.partition(',')[0]}, {self.name}"
            own = merged(own, {"paper": {"table": title, **_paper_value(self.printed, unit)}})
        return read_variant(self.base, own, self.name, changes)


def table_names() -> list[str]:
    """Return the names of all tables."""
    return sorted(file.stem for file in TABLES.glob("*.toml"))


def read_table(name: str) -> PaperTable:
    """Return a table by name.

    Raises:
        SettingError: there is none, or its file is wrong.
    """
    if name not in table_names():
        raise SettingError(f"no table {name!r}; {suggestion(name, table_names())}")
    file = TABLES / f"{name}.toml"
    try:
        return msgspec.toml.decode(file.read_bytes(), type=PaperTable)
    except msgspec.MsgspecError as problem:
        raise SettingError(f"{file}: {problem}") from None


def cells_of_table(name: str, table: PaperTable) -> list[TableCell]:
    """Return all cells of a table, setting by setting."""
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
