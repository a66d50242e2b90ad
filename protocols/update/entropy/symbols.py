"""Symbols that are computed in any order, many at once, and written in their order."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fleetune.protocols.update.entropy.quarter_octaves import Ints
from fleetune.protocols.update.entropy.range_coder import RangeEncoder

Interval = tuple[int, int, int]  # (start, size, total)


@dataclass(frozen=True)
class Symbols:
    """Intervals for a range coder, see `RangeEncoder.write`.

    Attributes:
        order: sort key of each symbol; symbols with equal keys are written as they stand here; shape (n,).
        start, size, total: interval of each symbol, same shape.
    """

    order: Ints
    start: Ints
    size: Ints
    total: Ints


def symbols_in_order(found: Iterable[tuple[int, int, int, int]]) -> Symbols:
    """Symbols from tuples (order, start, size, total)."""
    return Symbols(*np.array(list(found), np.int64).reshape(-1, 4).T)


def write_symbols(out: RangeEncoder, parts: list[Symbols]) -> None:
    """Write the symbols of all parts, sorted by their order."""
    by_order = np.argsort(np.concatenate([part.order for part in parts]), kind="stable")
    start, size, total = (
        np.concatenate([getattr(part, name) for part in parts])[by_order].tolist()
        for name in ("start", "size", "total")
    )
    out.write_all(start, size, total)
