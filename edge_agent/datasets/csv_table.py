"""CSV files: `csv:FILE?label=COLUMN`, rows as samples, windows of a series, or texts as token ids.

Windows of a series overlap, so their roles are not drawn one by one: a series is cut into blocks of time, no
window reaches over the end of a block, and a block's windows are tested, validated or trained on together
(`Dataset.block`). Blocks are counted from a file's first row: append to it, and nothing changes sides.
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
    """What may stand behind the question mark; lists have commas between.

    Attributes:
        label: columns of the label; of a series, those whose next values are asked for. Empty: none.
        columns: of the input, in this order; empty: all that have no other part.
        group: the column that says who a row is from. A window has rows of one group.
        test, validation: columns that mark rows by 1; not for a series.
        classes: a label's texts, in the order of its numbers; empty: the label is a number already.
        names: of the columns, where the file has no header.
        text: columns of words; the input is then their token ids.
        words: of a text, at most; shorter ones are filled up with 0.
        vocabulary: ids are below.
        window: rows of a series in one sample; 0: each row is a sample.
        horizon: rows behind the window whose `label` is asked for; 0: the label of the window's last row.
        stride: rows between the first rows of two windows.
        block: rows that have one role; 0: ten times window and horizon.
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


def load_table(source: str, path: Path, options: str) -> Dataset:
    """Read a CSV file, also compressed (`.gz`).

    Args:
        source: as the user wrote it, for messages.
        path: of the file.
        options: `key=value` with `&` between, see `TableOptions`.

    Raises:
        DataError: in one line, what is wrong with the options or the file.
    """
    asked = _options(source, options)
    file = CsvFile(source, path, name_list(asked.names))
    _check_columns(file, asked)
    if asked.window:
        return _windows(file, asked)
    x = _texts(file, asked) if asked.text else Numbers(file, _inputs(file, asked))
    label = _label_column(file, asked)
    group = Groups(file, asked.group) if asked.group else None
    test, validation = (Numbers(file, [name]) if name else None for name in (asked.test, asked.validation))
    file.fill(x, label, group, test, validation, cells_per_row=asked.words if asked.text else 0)
    return make_dataset(
        source,
        x.done(),
        _labels(label, asked),
        group=None if group is None else group.done(),
        test=None if test is None else test.done()[:, 0],
        validation=None if validation is None else validation.done()[:, 0],
    )


def _options(source: str, options: str) -> TableOptions:
    given = source_options(source, options)
    try:
        asked = convert(given, TableOptions, strict=False)
    except ValidationError as problem:
        known = ", ".join(TableOptions.__struct_fields__)
        raise DataError(f"{source}: {problem}; options are {known}, as in ?label=kwh&window=24") from None
    if asked.horizon and not (asked.window and asked.label):
        raise DataError(f"{source}: horizon asks for the label's next values; give window and label too")
    if asked.window and (asked.text or asked.test or asked.validation):
        raise DataError(f"{source}: a series has no text, and its blocks say what is tested; leave them out")
    if asked.text and asked.columns:
        raise DataError(f"{source}: text and columns both name the input; give one of them")
    if asked.classes and len(name_list(asked.label)) != 1:
        raise DataError(f"{source}: classes list the texts of one label; name its column with label=")
    twice = repeated(name_list(asked.classes))
    if twice is not None:
        raise DataError(f"{source}: classes lists {twice!r} twice; list each class once")
    return asked


def _check_columns(file: CsvFile, asked: TableOptions) -> None:
    """Raises DataError: there is no such column, or a column has two parts that exclude each other."""
    for option in ("label", "columns", "group", "test", "validation", "text"):
        file.check(_names(getattr(asked, option), option), option)
    answers = {} if asked.horizon else dict.fromkeys(name_list(asked.label), "label")
    answers |= {name: part for part in ("test", "validation") if (name := getattr(asked, part))}
    for name in name_list(asked.columns or asked.text):
        if name in answers:
            raise DataError(
                f"{file.source}: column {name} is the {answers[name]} and an input too; a model would only"
                f" copy it: take it out of {'columns' if asked.columns else 'text'}"
            )


def _names(text: str, option: str) -> list[str]:
    """The columns that an option names; group, test and validation name one, as it stands."""
    return name_list(text) if option in ("label", "columns", "text") else [text] * bool(text)


def _inputs(file: CsvFile, asked: TableOptions) -> list[str]:
    """Names of the input's columns. A series that is forecast is its own input, too."""
    labels = [] if asked.horizon else name_list(asked.label)
    used = {*labels, asked.group, asked.test, asked.validation}
    found = name_list(asked.columns) or [name for name in file.names if name not in used]
    if not found:
        raise DataError(f"{file.source}: no columns are left for the input")
    return found


def _texts(file: CsvFile, asked: TableOptions) -> TokenIds:
    return TokenIds(file, name_list(asked.text), asked.words, asked.vocabulary)


def _label_column(file: CsvFile, asked: TableOptions) -> Numbers | Classes | None:
    """None: there are no labels."""
    names = name_list(asked.label)
    if not names:
        return None
    return Classes(file, names[0], name_list(asked.classes)) if asked.classes else Numbers(file, names)


def _labels(
    column: Numbers | Classes | None, asked: TableOptions
) -> NDArray[np.int64] | NDArray[np.float32] | None:
    if column is None:
        return None
    if isinstance(column, Classes):
        return column.done()
    labels = column.done()
    is_class = column.whole and labels.shape[1] == 1 and not asked.horizon
    return labels[:, 0].astype(np.int64) if is_class else labels


def _windows(file: CsvFile, asked: TableOptions) -> Dataset:
    """Samples of shape (columns, window), time last, as convolutions take them."""
    inputs, label = Numbers(file, _inputs(file, asked)), _label_column(file, asked)
    group = Groups(file, asked.group) if asked.group else None
    file.fill(inputs, label, group)
    values, labels = inputs.done(), _labels(label, asked)
    groups = np.zeros(len(values), np.str_) if group is None else group.done()
    rows = asked.block or 10 * (asked.window + asked.horizon)
    starts: list[NDArray[np.intp]] = []
    blocks: list[NDArray[np.intp]] = []
    for group in dict.fromkeys(groups.tolist()):
        own = np.flatnonzero(groups == group)
        for first in range(0, own.size, rows):
            spans = _spans(own[first : first + rows], asked)
            blocks.append(np.full(len(spans), len(blocks)))
            starts.append(spans)
    spans = np.concatenate(starts)
    if not len(spans):
        raise DataError(f"{file.source}: no block of {rows} rows holds a window and its horizon")
    past, future = spans[:, : asked.window], spans[:, asked.window :]
    y = None
    if labels is not None:
        y = labels[future].reshape(len(spans), -1) if asked.horizon else labels[past[:, -1]]
    return make_dataset(
        file.source,
        np.ascontiguousarray(np.moveaxis(values[past], 1, 2)),
        y,
        group=groups[past[:, 0]] if asked.group else None,
        block=np.concatenate(blocks),
    )


def _spans(block: NDArray[np.intp], asked: TableOptions) -> NDArray[np.intp]:
    """Rows of each window of a block and of its horizon, shape (windows, window + horizon)."""
    length = asked.window + asked.horizon
    if block.size < length:
        return np.zeros((0, length), np.intp)
    return sliding_window_view(block, length)[:: asked.stride]
