"""Detects whether a torch module's samples are numbers or token ids, from the look-ups that it makes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fleetune.protocols.bounds import MOST_IDS
from fleetune.protocols.model.torch_dispatch import Watching


@dataclass(frozen=True)
class Samples:
    """The samples that a module accepts.

    Attributes:
        ids: True if samples are whole numbers, int64; False if they are float32.
        vocabulary: ids (or the looked-up numbers) are 0..vocabulary-1; None if samples are not looked up.
    """

    ids: bool
    vocabulary: int | None


def samples_of(module: nn.Module, input_shape: tuple[int, ...]) -> Samples:
    """Return the kind of samples that a module accepts, found in evaluation mode.

    A module accepts ids if it runs on whole numbers and looks rows up by them, or if it runs only on whole
    numbers. A look-up counts if its index grows by one with every number of a sample. So position embeddings
    and expert choices do not count. Weights, statistics and training modes do not change.

    Raises:
        Exception: the module rejects blank samples of numbers and of ids.
    """
    blank = blank_batch(module, input_shape)
    vocabulary = vocabulary_of(module, blank, blank + 1)
    if not blank.is_floating_point():
        return Samples(ids=True, vocabulary=vocabulary or MOST_IDS)
    return Samples(ids=vocabulary is not None and _runs(module, blank.long()), vocabulary=vocabulary)


def blank_batch(module: nn.Module, input_shape: tuple[int, ...]) -> Tensor:
    """Return two samples of zeros in the type that the module accepts: whole numbers if it rejects floats."""
    return forward_blank(module, input_shape)[0]


def forward_blank(module: nn.Module, input_shape: tuple[int, ...]) -> tuple[Tensor, Any]:
    """Return two blank samples, and the module's output for them in evaluation mode."""
    own = next(module.parameters(), None)
    batch = torch.zeros(2, *input_shape, device=None if own is None else own.device)
    try:
        return batch, _evaluated(module, batch)
    except (RuntimeError, TypeError, IndexError) as problem:
        ids = batch.long()
        try:
            return ids, _evaluated(module, ids)  # run once only, because a tracer counts the operations
        except Exception:  # noqa: BLE001 - a user's module may raise anything
            raise problem from None


def _evaluated(module: nn.Module, batch: Tensor) -> Any:
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        return module(batch)
    finally:
        for part, training in modes:
            part.training = training


def _runs(module: nn.Module, batch: Tensor) -> bool:
    try:
        _evaluated(module, batch)
    except Exception:  # noqa: BLE001 - a user's module may raise anything
        return False
    return True


def vocabulary_of(module: nn.Module, blank: Tensor, changed: Tensor) -> int | None:
    """Return the smallest number of rows in which samples themselves are looked up; None if they are not.

    Args:
        module: the module.
        blank: samples of zeros.
        changed: the same samples; the numbers that may be token ids are 1.
    """
    at_zero, at_one = _lookups(module, blank), _lookups(module, changed)
    if at_zero and not at_one:  # a table with a single row
        return min(rows for rows, _ in at_zero)
    if len(at_zero) != len(at_one):
        return None
    pairs = [(rows, low, high) for (rows, low), (_, high) in zip(at_zero, at_one, strict=True)]
    sizes = [
        rows - int(low.max())
        for rows, low, high in pairs
        if low.numel() and low.shape == high.shape and bool((high - low == 1).all())
    ]
    return min(sizes, default=None)


def is_looked_up(module: nn.Module, blank: Tensor, changed: Tensor) -> bool:
    """True if a look-up finds other rows, or none, for the changed samples."""
    before, after = _lookups(module, blank), _lookups(module, changed)
    return len(before) != len(after) or any(
        not torch.equal(one, other) for (_, one), (_, other) in zip(before, after, strict=True)
    )


def _lookups(module: nn.Module, batch: Tensor) -> list[tuple[int, Tensor]]:
    """Return a forward pass's look-ups as (number of rows, looked-up rows); none if the pass fails."""
    watch = _Watch()
    with torch.no_grad(), watch:
        return watch.seen if _runs(module, batch) else []


class _Watch(Watching):
    """Records every look-up as (number of rows, looked-up rows)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[int, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rows = _ROWS.get(func.overloadpacket.__name__)
        if rows is not None and (found := rows(*args)) is not None and not found[1].is_floating_point():
            self.seen.append((found[0], found[1].detach().clone().long()))
        return func(*args, **(kwargs or {}))


def _by_first_index(table: Tensor, indices: Any, *_: Any) -> tuple[int, Tensor] | None:
    places = [place for place, index in enumerate(indices) if index is not None]
    if len(places) != 1 or indices[places[0]].dtype == torch.bool:
        return None
    return table.size(places[0]), indices[places[0]]


_ROWS: dict[str, Callable[..., tuple[int, Tensor] | None]] = {
    "embedding": lambda table, ids, *_: (table.size(0), ids),
    "_embedding_bag": lambda table, ids, *_: (table.size(0), ids),
    "_embedding_bag_forward_only": lambda table, ids, *_: (table.size(0), ids),
    "index": _by_first_index,
    "index_select": lambda table, axis, ids, *_: (table.size(axis), ids),
    "scatter": lambda table, axis, ids, *_: (table.size(axis), ids),  # one_hot is built from this operation
    "scatter_": lambda table, axis, ids, *_: (table.size(axis), ids),
}
