"""Plausibility of claims: samples, ratios and scores in a device's report or reply must be possible."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Self

from msgspec import UNSET

from fleetune.coordinator.extensions.extension import Arrival, Extension, RunContext
from fleetune.protocols.errors import PacketCorrupt, PacketOverclaimed
from fleetune.protocols.method import steps
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.method.method import Method
from fleetune.protocols.tasks.task import Task
from fleetune.protocols.wire.payloads import Measures, Reply


class ReplyClaims(Extension):
    """Checks what devices claim, in every report and every reply.

    Args:
        method: of the run, for its ratios.
        max_samples: `round.max_samples`.
        learns: the run's task, with its scores.
    """

    def __init__(self, method: Method[Any, Any, Any, Any], max_samples: int, learns: Task) -> None:
        self._method, self._max_samples, self._learns = method, max_samples, learns

    @classmethod
    def of_run(cls, run: RunContext) -> Self | None:
        return cls(run.method, run.settings.round.max_samples, run.learns)

    def admit(self, report: DeviceReport) -> None:
        """Check the ratios and the samples of a report.

        Raises:
            PacketCorrupt: a ratio is not one of the method's, or those that the device affords are not in
            order. PacketOverclaimed: the report claims more samples than a device of this run may have.
        """
        ratios = [choice.ratio for choice in steps.choices(self._method, report)]
        if report.ratio not in ratios:
            raise PacketCorrupt(f"ready with ratio {report.ratio:g}; the method has {ratios}")
        offered = [] if report.affords is UNSET else [one.ratio for one in report.affords]
        if any(ratio not in ratios for ratio in offered) or offered != sorted(set(offered)):
            raise PacketCorrupt(f"ready to work at {offered}, ascending; the method has {ratios}")
        if report.num_samples > self._max_samples:
            raise PacketOverclaimed(
                f"ready with {report.num_samples} samples; round.max_samples = {self._max_samples}"
            )

    def check(self, arrival: Arrival) -> None:
        check_claims(arrival.reply, arrival.report)
        check_scores(arrival.reply.measures, self._learns)


def check_claims(reply: Reply[Any], report: DeviceReport | None) -> None:
    """Check that a reply claims at most the samples that its device reported, which weigh it in averages.

    Raises:
        PacketOverclaimed: the reply claims more, in its measures or anywhere in its update.
    """
    if report is None:
        return
    for place, claimed in _claims(reply, "reply"):
        if claimed > report.num_samples:
            raise PacketOverclaimed(
                f"{place} is {claimed}, but the device reported {report.num_samples} training samples"
            )


def check_scores(measures: Measures, task: Task) -> None:
    """Check that a device's scores are possible in the run's task.

    Raises:
        PacketOverclaimed: a figure is outside the range of its score, or the task has no such score.
    """
    bounds = {one.name: one.bounds for one in task.scores}
    places = ("before", "after", "personal", "validation", "kept", "alone")
    found = [(place, task.score.name, getattr(measures, place)) for place in places]
    found += [(f"scores[{name}]", name, value) for name, value in (measures.scores or {}).items()]
    for place, name, value in found:
        if name not in bounds:
            raise PacketOverclaimed(f"{place}: {task.kind} has no such score")
        if value is None or value is UNSET:
            continue
        lowest, highest = bounds[name]
        if not lowest <= value <= highest:
            raise PacketOverclaimed(f"{place} is {value:g}, but {name} is {lowest:g} to {highest:g}")
    lowest, highest = bounds[task.score.name]
    if measures.gain is not UNSET and abs(measures.gain) > highest - lowest:
        raise PacketOverclaimed(
            f"gain is {measures.gain:g}, but {task.score.name} is {lowest:g} to {highest:g}"
        )


def _claims(value: object, name: str) -> Iterator[tuple[str, int]]:
    if not dataclasses.is_dataclass(value):
        return
    for part in dataclasses.fields(value):
        inner, place = getattr(value, part.name), f"{name}.{part.name}"
        if part.name == "num_samples":
            yield place, inner
        else:
            yield from _claims(inner, place)
