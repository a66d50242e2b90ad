"""What a device says of itself and of its work, in few bytes: for runs that are `brief`.

Figures of a clock or a meter have four digits, which is more than they are worth. What decides anything to
the last bit, a ratio or a count, stays as it is.
"""

from dataclasses import replace
from typing import Any

from msgspec import structs

from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.round_cost import RoundCost

DIGITS = 4
_OF_COST = ("download_s", "train_s", "upload_s", "joules", "left_out")
_OF_REPORT = ("samples_per_s", "uplink_bps", "downlink_bps", "round_s")
_OF_CONDITIONS = ("watts", "celsius")


def short_cost(cost: RoundCost) -> RoundCost:
    """What a round takes."""
    return structs.replace(cost, processor_s=None, **_rounded(cost, _OF_COST))


def short_report(report: DeviceReport) -> DeviceReport:
    """What a device says of itself."""
    conditions = structs.replace(report.conditions, **_rounded(report.conditions, _OF_CONDITIONS))
    return replace(report, conditions=conditions, **_rounded(report, _OF_REPORT))


def said_late(cost: RoundCost) -> RoundCost:
    """What a coordinator cannot know before the update has arrived; all else it was told then."""
    return RoundCost(upload_s=cost.upload_s, joules=cost.joules)


def _rounded(of: object, names: tuple[str, ...]) -> dict[str, Any]:
    figures = {name: getattr(of, name) for name in names}
    return {name: None if one is None else float(f"{one:.{DIGITS}g}") for name, one in figures.items()}
