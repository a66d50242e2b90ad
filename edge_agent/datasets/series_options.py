"""The options that `csv:`, `watch:` and `mqtt:` share: columns, time, gaps, missing values and windows."""

import math
import re
from typing import Annotated, Literal, TypeVar

from msgspec import Meta, Struct, ValidationError, convert

from fleetune.edge_agent.datasets.source_options import name_list, repeated
from fleetune.protocols.errors import DataError

Length = Annotated[int, Meta(ge=1, le=2**20)]
Size = Annotated[int, Meta(ge=0, le=2**20)]
_ALSO = {"x": "columns", "value": "columns"}
_RENAMED = {"stride": "step"}
CLASSES_OF_ONE = "classes lists the texts of one label; name its column with label="
_UNIT_S = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]*)?)(ms|s|m|h|d|)")


class SeriesOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Options after the question mark. Lists are separated by commas. A column of messages is a JSON path.

    Attributes:
        label: label columns; with `horizon`, the columns to forecast. Empty: no label.
        columns: input columns, in this order; empty: all columns that have no other role.
        group: column with the person, place or machine of a row. All rows of a window have the same group.
        classes: texts of the label in the order of their class numbers; empty: the label is a number.
        names: names of the columns of a file without header.
        time: columns of the time of a row: a number, a date, or parts of a date (year, month, ...).
        gap: longest time between two rows of a window, such as 90, 90s, 5m, 2h. A number without unit has the
            unit of the time column: seconds, if that has dates.
        missing: what an empty cell does. "refuse": the row is refused. "gap": the row is left out, and no
            window crosses it. "hold": the last value is repeated, for at most `window` rows.
        window: rows in one sample; 0: each row is a sample.
        horizon: rows after the window whose `label` is to be forecast; 0: the label is that of the last row.
        step: rows between the starts of two windows.
        block: rows that belong to the same part of the split; 0: ten times window and horizon.
    """

    label: str = ""
    columns: str = ""
    group: str = ""
    classes: str = ""
    names: str = ""
    time: str = ""
    gap: str = ""
    missing: Literal["refuse", "gap", "hold"] = "refuse"
    window: Size = 0
    horizon: Size = 0
    step: Length = 1
    block: Size = 0

    @property
    def length(self) -> int:
        """Rows that a sample needs, with those that it forecasts."""
        return self.window + self.horizon

    @property
    def block_rows(self) -> int:
        """Rows that belong to the same part of the split."""
        return self.block or 10 * self.length

    @property
    def longest_gap(self) -> float:
        """Longest time between two rows of a window, in seconds or in the unit of the time column."""
        return duration(self.gap) if self.gap else math.inf


Options = TypeVar("Options", bound=SeriesOptions)


def series_options(source: str, given: dict[str, str], kind: type[Options]) -> Options:
    """Return the options of a source.

    Args:
        source: the source as the user wrote it, for messages.
        given: option texts by name.
        kind: the options that this source takes.

    Raises:
        DataError: an option is unknown, has a wrong value, or contradicts another.
    """
    named: dict[str, str] = {}
    for name, text in given.items():
        if name in _RENAMED:
            raise DataError(f"{source}: option {name} is called {_RENAMED[name]} now")
        if (found := _ALSO.get(name, name)) in named:
            raise DataError(f"{source}: option {found} is given twice (x and value are other names of it)")
        named[found] = text
    try:
        options = convert(named, kind, strict=False)
    except ValidationError as problem:
        known = ", ".join(kind.__struct_fields__)
        raise DataError(f"{source}: {problem}; the options are {known}, as in ?label=kwh&window=24") from None
    if wrong := _contradiction(options):
        raise DataError(f"{source}: {wrong}")
    return options


def _contradiction(options: SeriesOptions) -> str:
    """Return what is wrong with options that do not fit together; empty if they do."""
    window, twice = options.window, repeated(name_list(options.classes))
    wrong = {
        "horizon forecasts the label's next values; it needs window and label too": options.horizon
        and not (window and options.label),
        "missing=hold repeats the value of the row before, so it needs window; or use missing=gap": not window
        and options.missing == "hold",
        "gap keeps windows from crossing a pause; it needs window too": options.gap and not window,
        "window and time need gap too: the longest time between two rows of a window, as in gap=2s (twice the"
        " usual distance is a good start)": window and options.time and not options.gap,
        f"gap {options.gap[:20]!r} is no duration; write 90, 500ms, 90s, 5m, 2h or 1d": options.gap
        and not duration(options.gap),
        f"no block of {options.block} rows holds a window and its horizon ({options.length} rows); give a"
        " larger block": 0 < options.block < options.length,
        CLASSES_OF_ONE: options.classes and len(name_list(options.label)) > 1,
        f"classes lists {twice!r} twice; list each class once": twice is not None,
    }
    return next((words for words, is_wrong in wrong.items() if is_wrong), "")


def duration(text: str) -> float:
    """Return a duration such as 90, 500ms, 5m or 2h in seconds; 0 if the text is none."""
    found = _DURATION.fullmatch(text.strip())
    return float(found[1]) * _UNIT_S[found[2]] if found else 0.0
