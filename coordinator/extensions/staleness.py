"""Staleness: an update counts for less when its task was planned on a model that has been replaced since."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Self

from fleetune.coordinator.extensions.extension import Extension, RoundUpdates, RunContext
from fleetune.protocols.method.method import Method
from fleetune.protocols.wire.payloads import Reply


class StalenessDiscount(Extension):
    """Discounts stale updates by `Method.discount`.

    Args:
        method: of the run.
        power: `round.staleness_power`.
    """

    def __init__(self, method: Method[Any, Any, Any, Any], power: float) -> None:
        self._method, self._power = method, power

    @classmethod
    def of_run(cls, run: RunContext) -> Self | None:
        section = run.settings.round
        return None if section.mode == "synchronous" else cls(run.method, section.staleness_power)

    def weigh(self, replies: Iterator[Reply[Any]], round_: RoundUpdates) -> Iterator[Reply[Any]]:
        for reply in replies:
            staleness = round_.number - reply.round
            if not staleness:
                yield reply
                continue
            factor = staleness_factor(staleness, self._power)
            yield replace(reply, update=self._method.discount(round_.planned, reply.update, factor))


def staleness_factor(staleness: int, power: float) -> float:
    """1 / (1 + s) ** power: 1 for a fresh update (the polynomial rule of FedAsync, Xie et al. 2019)."""
    return float((1.0 + staleness) ** -power)
