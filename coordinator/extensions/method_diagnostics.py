"""The diagnostics of a method, checked and bounded, for the records. A fault in them never stops a round."""

import logging
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any, Self

import numpy as np
from msgspec.structs import replace

from fleetune.coordinator.extensions.extension import ClosedRound, Extension, RunContext
from fleetune.coordinator.rounds.records import DeviceRound, Diagnostics
from fleetune.protocols.method.diagnostics import MOST_PARTS, Diagnostic, declared_diagnostics
from fleetune.protocols.method.method import Method
from fleetune.protocols.one_line import unexpected
from fleetune.protocols.wire.payloads import Reply

log = logging.getLogger(__name__)

_GREATEST = 1e15  # a sum of many stays finite
_DIGITS = 8  # significant: what float32 knows, and a short line in rounds.jsonl
_LONGEST_PART = 64


class MethodDiagnostics(Extension):
    """Collects one method's diagnostics for the records of one run; each fault is logged once.

    Args:
        method: the run's method; it may be a user's own.
    """

    def __init__(self, method: Method[Any, Any, Any, Any]) -> None:
        self._method = method
        self._declared = declared_diagnostics(method)
        self._said: set[str] = set()

    @classmethod
    def of_run(cls, run: RunContext) -> Self | None:
        return cls(run.method)

    def record(self, reply: Reply[Any], row: DeviceRound) -> DeviceRound:
        return replace(row, diagnostics=self.of_update(reply.update))

    def after_round(self, closed: ClosedRound) -> Iterable[str]:
        if not closed.record.final_evaluation:
            diagnostics = self.of_round(closed.method_state)
            closed.record = replace(closed.record, diagnostics=diagnostics)
        return ()

    def of_update(self, update: object) -> Diagnostics:
        """Return diagnostics of a decoded and checked update; none for None, in the final evaluation."""
        return (
            {} if update is None else self._reported("update", lambda: self._method.diagnose_update(update))
        )

    def of_round(self, state: object) -> Diagnostics:
        """Return diagnostics of the state after a round."""
        return self._reported("round", lambda: self._method.diagnose_round(state))

    def _reported(self, of: str, tell: Callable[[], Mapping[str, Any]]) -> Diagnostics:
        declared = {one.name: one for one in self._declared if one.of == of}
        if not declared:
            return {}
        found: Diagnostics = {}
        try:
            with np.errstate(all="ignore"):
                reported = dict(tell())
            for name, diagnostic in declared.items():
                figure = reported.pop(name, None)
                if figure is not None:
                    found |= self._checked(diagnostic, figure)
        except Exception as fault:  # noqa: BLE001 - a user's own method may do anything
            self._say(f"of the {of}: {unexpected(fault)}")
            return {}
        for name in reported:
            self._say(f"{name!r:.60} of the {of} is not declared")
        return found

    def _checked(self, diagnostic: Diagnostic, reported: object) -> Diagnostics:
        """Return the figure by its name, without values that are not finite; empty if none remains."""
        name = diagnostic.name
        if diagnostic.by is None:
            value = self._number(name, reported)
            return {} if value is None else {name: value}
        if not isinstance(reported, Mapping):
            self._say(f"{name} has no parts")
            return {}
        if len(reported) > MOST_PARTS:
            self._say(f"{name} has {len(reported)} parts; the first {MOST_PARTS} are kept")
        known = ((str(part)[:_LONGEST_PART], self._number(name, reported[part])) for part in reported)
        parts = {part: value for part, value in islice(known, MOST_PARTS) if value is not None}
        return {name: parts} if parts else {}

    def _number(self, name: str, reported: object) -> float | None:
        value = float(reported) if isinstance(reported, numbers.Real | np.bool_) else math.nan
        if not abs(value) <= _GREATEST:
            self._say(f"{name} is {reported!r:.60}, which is no number up to {_GREATEST:g}")
            return None
        return float(f"{value:.{_DIGITS}g}")

    def _say(self, problem: str) -> None:
        if problem not in self._said and len(self._said) < MOST_PARTS:
            self._said.add(problem)
            log.warning("a diagnostic of the method is left out of the records: %s", problem)
