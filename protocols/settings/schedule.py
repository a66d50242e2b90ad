"""When rounds happen: the keys of [schedule], and what their words mean in numbers.

What follows from them at a given time is decided by `coordinator.rounds.policies.schedule`.
"""

import re
from typing import Annotated

from msgspec import Meta

from fleetune.protocols.bounds import MAX_NUMBER
from fleetune.protocols.settings.section import Count, Settings

DAY_S = 86_400
UTC = "UTC"  # known also where no time zones are installed
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": DAY_S, "w": 7 * DAY_S}
_LONGEST_S = 3660 * DAY_S


class ScheduleSection(Settings, frozen=True):
    """[schedule] When a round may open; without it rounds follow each other back to back.

    `every`, `at` and `window` say when it may, `new_samples` and `drift` whether: both must be so.

    Attributes:
        every: from one round to the next at least, e.g. "24h", "90m", "7d"; with `at`, or with a `window`
            and whole days, it counts days instead.
        at: time of day at which a round is due, e.g. "02:00"; one that was missed is made up as soon as the
            coordinator is back, if its `window` is still open.
        window: a round opens only between these times of day, e.g. "01:00-05:00", "22:00-06:00"; the last
            one is finished.
        zone: of these times, e.g. "Europe/Berlin"; None: the coordinator's own.
        new_samples: a round opens when `devices` devices have so many new samples since their last round.
        drift: a round opens when `devices` devices find that their data have changed.
        devices: how many must say so; with both keys either is enough.
        first_rounds: so many rounds follow each other back to back when the run begins, before any of this
            holds: a model that is worth keeping up, and what drift is measured against.
    """

    every: str | None = None
    at: str | None = None
    window: str | None = None
    zone: str | None = None
    new_samples: Count | None = None
    drift: bool = False
    devices: Count = 1
    first_rounds: Annotated[int, Meta(ge=0, le=MAX_NUMBER)] = 0

    def __post_init__(self) -> None:
        span, at_s, every_s = self.window_s, self.at_s, self.every_s  # each raises a ValueError with its key
        if every_s is not None and at_s is not None and every_s % DAY_S:
            raise ValueError(f'every = "{self.every}" with at: say whole days, e.g. "24h"')
        if span is not None and at_s is not None and (at_s - span[0]) % DAY_S >= span[1]:
            raise ValueError(f'at = "{self.at}" is not in window = "{self.window}"')
        if self.devices != 1 and not self.asks_devices:
            raise ValueError("devices goes with new_samples or drift")
        if self.zone is not None:
            _check_zone(self.zone)

    @property
    def is_free(self) -> bool:
        """Whether rounds follow each other back to back."""
        return self.every is None and self.at is None and self.window is None and not self.asks_devices

    @property
    def asks_devices(self) -> bool:
        """Whether it is for devices to say that training would pay."""
        return self.new_samples is not None or self.drift

    @property
    def every_s(self) -> int | None:
        """`every` in seconds. Raises ValueError: it is no time span."""
        return None if self.every is None else seconds_of_span(self.every, "every")

    @property
    def at_s(self) -> int | None:
        """`at` in seconds since midnight. Raises ValueError: it is no time of day."""
        return None if self.at is None else seconds_of_day(self.at, "at")

    @property
    def window_s(self) -> tuple[int, int] | None:
        """Where `window` begins, in seconds since midnight, and how long it is; past midnight it goes on.

        Raises ValueError: it is none.
        """
        if self.window is None:
            return None
        first, dash, last = self.window.partition("-")
        if not dash:
            raise ValueError(f'window = "{self.window}": say two times of day, e.g. "01:00-05:00"')
        start, end = (seconds_of_day(one.strip(), "window") for one in (first, last))
        return start, (end - start) % DAY_S or DAY_S


def seconds_of_span(text: str, key: str) -> int:
    """Seconds of a time span such as "24h". Raises ValueError that names the key."""
    found = re.fullmatch(r"([0-9]{1,9})([smhdw])", text)
    seconds = int(found[1]) * _UNITS[found[2]] if found else 0
    if not 0 < seconds <= _LONGEST_S:
        raise ValueError(f'{key} = "{text}": say a number and s, m, h, d or w, e.g. "24h"')
    return seconds


def seconds_of_day(text: str, key: str) -> int:
    """Seconds since midnight at a time of day such as "02:00". Raises ValueError that names the key."""
    found = re.fullmatch(r"([01]?[0-9]|2[0-3]):([0-5][0-9])", text)
    if not found:
        raise ValueError(f'{key} = "{text}": say a time of day, e.g. "02:00"')
    return 3600 * int(found[1]) + 60 * int(found[2])


def _check_zone(name: str) -> None:
    """Raises ValueError: there is no such time zone on this machine."""
    from zoneinfo import ZoneInfo

    if name == UTC:
        return
    try:
        ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise ValueError(f'zone = "{name}" is no time zone known here, e.g. "Europe/Berlin"') from None
