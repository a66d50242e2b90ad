"""Symbols that are put together out of order, and written in order: many at once, instead of one by one."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fleetune.protocols.update.entropy.quarter_octaves import Ints
from fleetune.protocols.update.entropy.range_coder import RangeEncoder

Interval = tuple[int, int, int]  # start, size and total


@dataclass(frozen=True)
class Symbols:
    """Intervals for a range coder, see `RangeEncoder.write`.

    Attributes:
        order: symbols are written by it, those of the same one as they stand here; shape (n,).
        start, size, total: of each, same shape.
    """

    order: Ints
    start: Ints
    size: Ints
    total: Ints


def symbols_in_order(found: Iterable[tuple[int, int, int, int]]) -> Symbols:
    """Of each its order, start, size and total."""
    return Symbols(*np.array(list(found), np.int64).reshape(-1, 4).T)


def write_symbols(out: RangeEncoder, parts: list[Symbols]) -> None:
    """Write all of them, each where its order says."""
    by_order = np.argsort(np.concatenate([part.order for part in parts]), kind="stable")
    start, size, total = (
        np.concatenate([getattr(part, name) for part in parts])[by_order].tolist()
        for name in ("start", "size", "total")
    )
    out.write_all(start, size, total)
