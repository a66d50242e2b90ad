"""Finds the module of a model to which each traced operation belongs, also in the backward pass."""

from bisect import bisect_right
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn


class Paths:
    """Records which module of a model is active at each traced operation."""

    def __init__(self, module: nn.Module, count: Callable[[], int] = lambda: 0) -> None:
        """Prepare the record.

        Args:
            module: the model.
            count: returns the number of operations that were traced until now.
        """
        self._module, self._count = module, count
        self._stack = [""]
        self._changes: list[tuple[int, str]] = []  # (number of operations before, module)
        self._hooked: set[Any] = set()  # functions of the backward pass; several losses share them
        self._spans: list[tuple[int, int, str]] = []  # (first and end of autograd's sequence numbers, module)

    def __enter__(self) -> Self:
        self._hooks = []
        for path, part in self._module.named_modules():
            self._hooks.append(part.register_forward_pre_hook(self._entering(path), prepend=True))
            self._hooks.append(part.register_forward_hook(self._leaving(), always_call=True))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def current(self) -> str:
        """The path of the module that runs now."""
        return self._stack[-1]

    def watch(self, total: Tensor) -> None:
        """Hook the backward pass of this loss, so that its operations are assigned to modules too."""
        waiting = [total.grad_fn]
        while waiting:
            function = waiting.pop()
            if function is None or function in self._hooked:
                continue
            self._hooked.add(function)
            path = self._owner(function._sequence_nr())  # noqa: SLF001
            function.register_prehook(lambda _, path=path: self._note(path))
            waiting += [following for following, _ in function.next_functions]

    def of(self, index: int) -> str:
        """Return the path of the module to which the operation with this index belongs."""
        place = bisect_right(self._changes, index, key=lambda change: change[0])
        return self._changes[place - 1][1] if place else ""

    def _owner(self, number: int) -> str:
        inside = [
            (stop - start, -len(path), path) for start, stop, path in self._spans if start <= number < stop
        ]
        return min(inside)[2] if inside else ""

    def _entering(self, path: str) -> Callable[..., None]:
        def enter(*_: object) -> None:
            self._stack.append(path)
            self._spans.append((_sequence_number(), -1, path))
            self._note(path)

        return enter

    def _leaving(self) -> Callable[..., None]:
        def leave(*_: object) -> None:
            path = self._stack.pop()
            place = max(i for i, (_, stop, of) in enumerate(self._spans) if stop == -1 and of == path)
            self._spans[place] = (self._spans[place][0], _sequence_number(), path)
            self._note(self._stack[-1])

        return leave

    def _note(self, path: str) -> None:
        self._changes.append((self._count(), path))


def _sequence_number() -> int:
    return int(torch._C._autograd._get_sequence_nr())  # noqa: SLF001
