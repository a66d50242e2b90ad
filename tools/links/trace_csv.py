"""Link traces as CSV files with the columns `time_s,uplink_bps,downlink_bps`.

The rates of a row apply until the time of the next row. After the last row the trace repeats. Lines that
begin with # are comments. Times are relative to the first row; the last row lasts as long as the row before
it.
"""

import csv
import math
from collections.abc import Iterator
from pathlib import Path

from fleetune.protocols.errors import SettingError
from fleetune.protocols.input_files import open_text_input
from fleetune.tools.links.link import Trace

COLUMNS = ["time_s", "uplink_bps", "downlink_bps"]
MAX_BYTES = 64 << 20
Row = tuple[float, float, float]


def read_trace(path: Path, *, delay_s: float = 0.0, loss: float = 0.0) -> Trace:
    """Return the link that a trace file describes.

    Args:
        path: the file.
        delay_s: one-way delay of the link; the file does not contain it.
        loss: packet loss of the link, 0..1; the file does not contain it.

    Raises:
        SettingError: the file is missing, too long or not a valid trace; the message names a wrong line.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise SettingError(
                f"{path}: the file is longer than {MAX_BYTES >> 20} MiB; remove rows from the trace"
            )
        rows = list(_rows(path))
    except FileNotFoundError:
        raise SettingError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        raise SettingError(f"{path}: cannot be read as CSV: {problem}") from None
    if len(rows) < 2:
        raise SettingError(f"{path}: a trace needs at least two rows below the header {','.join(COLUMNS)}")
    times_s, uplink, downlink = zip(*rows, strict=True)
    from_zero = tuple(time - times_s[0] for time in times_s)
    period_s = 2 * from_zero[-1] - from_zero[-2]
    try:
        return Trace(from_zero, uplink, downlink, period_s, delay_s, loss)
    except SettingError as problem:
        raise SettingError(f"{path}: {problem}") from None


def _rows(path: Path) -> Iterator[Row]:
    with open_text_input(path, MAX_BYTES, error=SettingError) as file:
        lines = csv.reader(file)
        cells = ((lines.line_num, row) for row in lines if row and not row[0].lstrip().startswith("#"))
        number, header = next(cells, (1, []))
        if [cell.strip() for cell in header] != COLUMNS:
            raise SettingError(f"{path}, line {number}: the header must be {','.join(COLUMNS)}")
        last_s = -math.inf
        for number, row in cells:
            time_s, *rates = (_number(cell, f"{path}, line {number}") for cell in row)
            if len(rates) != 2:
                raise SettingError(f"{path}, line {number}: {len(row)} values, but a row needs 3")
            if time_s <= last_s:
                raise SettingError(f"{path}, line {number}: time_s must be greater than in the row before")
            if min(rates) < 0:
                raise SettingError(f"{path}, line {number}: a rate is negative; write 0 for an outage")
            yield time_s, rates[0], rates[1]
            last_s = time_s


def _number(cell: str, where: str) -> float:
    try:
        number = float(cell)
    except ValueError:
        raise SettingError(f"{where}: {cell[:40]!r} is no number") from None
    if not math.isfinite(number):
        raise SettingError(f"{where}: {cell.strip()} is out of range: a link needs finite values")
    return number
