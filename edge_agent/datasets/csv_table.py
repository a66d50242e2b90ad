"""CSV files, `csv:FILE?label=COLUMN`: rows as samples, windows of a time series, or texts as token ids.

Windows of a time series overlap, so they cannot be split one by one. The series is cut into blocks of time,
and no window crosses the end of a block. All windows of a block belong to the same part of the split
(`Dataset.block`). Blocks are counted from the file's first row, so that appended rows move no window to
another part.
"""

from pathlib import Path
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct, ValidationError, convert
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from fleetune.edge_agent.datasets.csv_columns import Classes, CsvFile, Groups, Numbers, TokenIds
from fleetune.edge_agent.datasets.dataset import Dataset, make_dataset
from fleetune.edge_agent.datasets.source_options import name_list, repeated, source_options
from fleetune.protocols.errors import DataError

VOCABULARY = 8192  # of the built-in model `text-embedding`
Length = Annotated[int, Meta(ge=1, le=2**20)]
Size = Annotated[int, Meta(ge=0, le=2**20)]


class TableOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Options after the question mark. Lists are separated by commas.

    Attributes:
        label: label columns; with `horizon`, the columns to forecast. Empty: no label.
        columns: input columns, in this order; empty: all columns that have no other role.
        group: column with the person or place of a row. All rows of a window have the same group.
        test, validation: columns that mark rows of that part with 1; not for a time series.
        classes: texts of the label in the order of their class numbers; empty: the label is a number.
        names: names of the columns of a file without header.
        text: columns of words; the input is their token ids.
        words: largest number of words of a text; shorter texts are padded with 0.
        vocabulary: number of token ids.
        window: rows of a time series in one sample; 0: each row is a sample.
        horizon: rows after the window whose `label` is to be forecast; 0: the label is that of the last row.
        stride: rows between the starts of two windows.
        block: rows that belong to the same part of the split; 0: ten times window and horizon.
    """

    label: str = ""
    columns: str = ""
    group: str = ""
    test: str = ""
    validation: str = ""
    classes: str = ""
    names: str = ""
    text: str = ""
    words: Length = 48
    vocabulary: Annotated[int, Meta(ge=2, le=2**24)] = VOCABULARY
    window: Size = 0
    horizon: Size = 0
    stride: Length = 1
    block: Size = 0


def load_csv(source: str, path: Path, options: str) -> Dataset:
    """Load a CSV file, plain or compressed (`.gz`).

    Args:
        source: the source as the user wrote it, for messages.
        path: path of the file.
        options: `key=value` pairs separated by `&`, see `TableOptions`.

    Raises:
        DataError: an option or the file is wrong.
    """
    settings = _options(source, options)
    file = CsvFile(source, path, name_list(settings.names))
    _check_columns(file, settings)
    if settings.window:
        return _windows(file, settings)
    x = _texts(file, settings) if settings.text else Numbers(file, _inputs(file, settings))
    label = _label_column(file, settings)
    group = Groups(file, settings.group) if settings.group else None
    test, validation = (
        Numbers(file, [name]) if name else None for name in (settings.test, settings.validation)
    )
    file.fill(x, label, group, test, validation, cells_per_row=settings.words if settings.text else 0)
    return make_dataset(
        source,
        x.done(),
        _labels(label, settings),
        group=None if group is None else group.done(),
        test=None if test is None else test.done()[:, 0],
        validation=None if validation is None else validation.done()[:, 0],
    )


def _options(source: str, options: str) -> TableOptions:
    given = source_options(source, options)
    try:
        settings = convert(given, TableOptions, strict=False)
    except ValidationError as problem:
        known = ", ".join(TableOptions.__struct_fields__)
        raise DataError(f"{source}: {problem}; the options are {known}, as in ?label=kwh&window=24") from None
    if settings.horizon and not (settings.window and settings.label):
        raise DataError(f"{source}: horizon forecasts the label's next values; it needs window and label too")
    if settings.window and (settings.text or settings.test or settings.validation):
        raise DataError(
            f"{source}: with window, the options text, test and validation are not allowed; leave them out"
        )
    if settings.text and settings.columns:
        raise DataError(f"{source}: text and columns both name the input; give only one of them")
    if settings.classes and len(name_list(settings.label)) != 1:
        raise DataError(f"{source}: classes lists the texts of one label; name its column with label=")
    twice = repeated(name_list(settings.classes))
    if twice is not None:
        raise DataError(f"{source}: classes lists {twice!r} twice; list each class once")
    return settings


def _check_columns(file: CsvFile, settings: TableOptions) -> None:
    """Raise DataError if a column in the options does not exist, or is both label and input."""
    for option in ("label", "columns", "group", "test", "validation", "text"):
        file.check(_names(getattr(settings, option), option), option)
    labels_and_roles = {} if settings.horizon else dict.fromkeys(name_list(settings.label), "label")
    labels_and_roles |= {name: part for part in ("test", "validation") if (name := getattr(settings, part))}
    for name in name_list(settings.columns or settings.text):
        if name in labels_and_roles:
            raise DataError(
                f"{file.source}: column {name} is the {labels_and_roles[name]} and also an input,"
                " so a model would"
                f" only copy it: take it out of {'columns' if settings.columns else 'text'}"
            )


def _names(text: str, option: str) -> list[str]:
    """Return the columns that an option names.

    The options group, test and validation name one column each.
    """
    return name_list(text) if option in ("label", "columns", "text") else [text] * bool(text)


def _inputs(file: CsvFile, settings: TableOptions) -> list[str]:
    """Return the names of the input columns. With a horizon, the forecast columns are inputs too."""
    labels = [] if settings.horizon else name_list(settings.label)
    used = {*labels, settings.group, settings.test, settings.validation}
    found = name_list(settings.columns) or [name for name in file.names if name not in used]
    if not found:
        raise DataError(f"{file.source}: no column is left for the input; name the input with columns=")
    return found


def _texts(file: CsvFile, settings: TableOptions) -> TokenIds:
    return TokenIds(file, name_list(settings.text), settings.words, settings.vocabulary)


def _label_column(file: CsvFile, settings: TableOptions) -> Numbers | Classes | None:
    """Return the label's column; None if there are no labels."""
    names = name_list(settings.label)
    if not names:
        return None
    return Classes(file, names[0], name_list(settings.classes)) if settings.classes else Numbers(file, names)


def _labels(
    column: Numbers | Classes | None, settings: TableOptions
) -> NDArray[np.int64] | NDArray[np.float32] | None:
    if column is None:
        return None
    if isinstance(column, Classes):
        return column.done()
    labels = column.done()
    is_class = column.whole and labels.shape[1] == 1 and not settings.horizon
    return labels[:, 0].astype(np.int64) if is_class else labels


def _windows(file: CsvFile, settings: TableOptions) -> Dataset:
    """Return windows of a time series as samples of shape (columns, window), time last, for convolutions."""
    inputs, label = Numbers(file, _inputs(file, settings)), _label_column(file, settings)
    group = Groups(file, settings.group) if settings.group else None
    file.fill(inputs, label, group)
    values, labels = inputs.done(), _labels(label, settings)
    groups = np.zeros(len(values), np.str_) if group is None else group.done()
    rows = settings.block or 10 * (settings.window + settings.horizon)
    starts: list[NDArray[np.intp]] = []
    blocks: list[NDArray[np.intp]] = []
    for group in dict.fromkeys(groups.tolist()):
        own = np.flatnonzero(groups == group)
        for first in range(0, own.size, rows):
            spans = _spans(own[first : first + rows], settings)
            blocks.append(np.full(len(spans), len(blocks)))
            starts.append(spans)
    spans = np.concatenate(starts)
    if not len(spans):
        raise DataError(
            f"{file.source}: no block of {rows} rows holds a window and its horizon; give a larger"
            " block or file"
        )
    past, future = spans[:, : settings.window], spans[:, settings.window :]
    y = None
    if labels is not None:
        y = labels[future].reshape(len(spans), -1) if settings.horizon else labels[past[:, -1]]
    return make_dataset(
        file.source,
        np.ascontiguousarray(np.moveaxis(values[past], 1, 2)),
        y,
        group=groups[past[:, 0]] if settings.group else None,
        block=np.concatenate(blocks),
    )


def _spans(block: NDArray[np.intp], settings: TableOptions) -> NDArray[np.intp]:
    """Return the rows of each window of a block with its horizon, shape (windows, window + horizon)."""
    length = settings.window + settings.horizon
    if block.size < length:
        return np.zeros((0, length), np.intp)
    return sliding_window_view(block, length)[:: settings.stride]
