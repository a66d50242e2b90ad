"""Rows as pandas data frames: numbers are numbers, NaN where there is none."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fleetune.protocols.errors import FleetuneError

if TYPE_CHECKING:
    import pandas as pd


def frame_of(
    rows: Sequence[Mapping[str, Any]], index: str | None = None, columns: Iterable[str] = ()
) -> "pd.DataFrame":
    """A data frame with a row for each of `rows`, columns in the order in which they are met first.

    Args:
        rows: numbers, texts, or None, by column.
        index: the column that becomes the index; None: none does.
        columns: what there is without rows.

    Raises:
        FleetuneError: pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError:
        raise FleetuneError("data frames need pandas: pip install 'pandas>=2.1'") from None
    names = dict.fromkeys(column for row in rows for column in row) or dict.fromkeys(columns)
    frame = pd.DataFrame({name: _values([row.get(name) for row in rows]) for name in names})
    return frame if index is None else frame.set_index(index)


def _values(values: list[Any]) -> list[Any]:
    """None as NaN among numbers."""
    if any(isinstance(value, str) for value in values):
        return values
    return [float("nan") if value is None else value for value in values]
