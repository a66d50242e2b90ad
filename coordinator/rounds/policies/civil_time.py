"""Times of day and days as clocks on the wall show them, through changes to summer time and back."""

import math
from collections.abc import Callable

from fleetune.protocols.settings.schedule import DAY_S

Zone = Callable[[float], float]
"""From seconds since 1970 (UTC), how many seconds clocks on the wall are ahead of UTC then."""

_GREATEST_S = 2.0**35  # the year 3058: a clock may show anything, a calendar ends somewhere
_WIDEST_S = 27 * 3600  # between the zones that are farthest ahead and behind
_EXACT_S = 1.0


def utc(at_s: float) -> float:
    """Seconds since 1970 that a calendar knows."""
    return min(max(at_s, 0.0), _GREATEST_S) if math.isfinite(at_s) else 0.0


def day_of(at_s: float, zone: Zone) -> int:
    """The day that clocks on the wall show, counted from 1970-01-01."""
    return math.floor((at_s + zone(at_s)) / DAY_S)


def instant(day: int, second_of_day: float, zone: Zone) -> float:
    """When clocks on the wall first show this time of this day, or have passed it, in seconds since 1970.

    So there is one such instant each day: an hour that summer time skips begins when it ends, and of an hour
    that comes twice it is the first.
    """
    wanted = day * DAY_S + second_of_day
    early, late = wanted - _WIDEST_S, wanted + _WIDEST_S
    before, after = wanted - zone(early), wanted - zone(late)
    if before + zone(before) == wanted:
        return before
    if after + zone(after) == wanted:
        return after
    while late - early > _EXACT_S:  # the change itself: clocks leap over what is wanted
        middle = math.floor((early + late) / 2)
        early, late = (early, middle) if middle + zone(middle) >= wanted else (middle, late)
    return math.ceil(late)
