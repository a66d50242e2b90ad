"""Local times of day and dates, through changes to daylight saving time and back."""

import math
from collections.abc import Callable

from fleetune.protocols.settings.schedule import DAY_S

Zone = Callable[[float], float]
"""Offset of local time from UTC in seconds, at a time in seconds since 1970 (UTC)."""

_GREATEST_S = 2.0**35  # year 3058: a device's clock may show any time, but a calendar has an end
_WIDEST_S = 27 * 3600  # seconds between the time zones that are farthest apart
_EXACT_S = 1.0


def utc(at_s: float) -> float:
    """Seconds since 1970, limited to what a calendar can represent."""
    return min(max(at_s, 0.0), _GREATEST_S) if math.isfinite(at_s) else 0.0


def day_of(at_s: float, zone: Zone) -> int:
    """Local date, as days since 1970-01-01."""
    return math.floor((at_s + zone(at_s)) / DAY_S)


def instant(day: int, second_of_day: float, zone: Zone) -> float:
    """When local time first reaches this time of this day, or has passed it, in seconds since 1970.

    So there is exactly one such instant a day. For a time that daylight saving skips, it is the end of the
    skipped hour. For a time that occurs twice, it is the first.
    """
    wanted = day * DAY_S + second_of_day
    early, late = wanted - _WIDEST_S, wanted + _WIDEST_S
    before, after = wanted - zone(early), wanted - zone(late)
    if before + zone(before) == wanted:
        return before
    if after + zone(after) == wanted:
        return after
    while late - early > _EXACT_S:  # the change of the clocks itself: local time jumps over the wanted time
        middle = math.floor((early + late) / 2)
        early, late = (early, middle) if middle + zone(middle) >= wanted else (middle, late)
    return math.ceil(late)
