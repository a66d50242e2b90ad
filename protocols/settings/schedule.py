"""Section [schedule] of run.toml: when rounds may start, and its times converted to seconds.

`coordinator.rounds.policies.schedule` decides by these keys whether a round may start now.
"""

import re
from datetime import time
from typing import Annotated

from msgspec import Meta

from fleetune.protocols.bounds import MAX_NUMBER
from fleetune.protocols.settings.section import Count, Settings

DAY_S = 86_400
UTC = "UTC"  # valid even where no time zone data are installed
_TIME = "([01]?[0-9]|2[0-3]):([0-5][0-9])"
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": DAY_S, "w": 7 * DAY_S}
_LONGEST_S = 3660 * DAY_S


class ScheduleSection(Settings, frozen=True):
    """[schedule] When a round may start. Without this section each round starts when the previous one ends.

    `every` and `window` limit the time; `new_samples` and `drift` require new data. Both conditions must
    hold.

    Attributes:
        every: shortest time between the starts of two rounds, e.g. "24h", "90m", "7d". With a `window` it
            counts from the opening of the window. So `every = "24h"` is one round in each night's window.
        window: times of day between which a round may start, e.g. "01:00-05:00" or "22:00-06:00". A round
            that is open when the window ends is finished. If the coordinator was down when the window opened,
            the round starts when it is back, provided that the window is still open.
        zone: time zone of these times, e.g. "Europe/Berlin". If left out, the coordinator's own.
        new_samples: number of new samples since its last round that a device must have to count. A round
            starts when `devices` devices have as many.
        drift: a round starts when `devices` devices report that the distribution of their data has changed.
        devices: number of devices that must report new samples or drift. With both keys either report is
            enough.
        first_rounds: number of rounds at the beginning of the run that ignore the schedule. They train the
            first useful model, against which drift is measured.
    """

    every: str | None = None
    window: str | None = None
    zone: str | None = None
    new_samples: Count | None = None
    drift: bool = False
    devices: Count = 1
    first_rounds: Annotated[int, Meta(ge=0, le=MAX_NUMBER)] = 0

    def __post_init__(self) -> None:
        # each raises a ValueError that names its key
        _ = self.hours, self.every_s
        if self.devices != 1 and not self.asks_devices:
            raise ValueError("devices goes with new_samples or drift")
        if self.zone is not None:
            _check_zone(self.zone)

    @property
    def is_free(self) -> bool:
        """True if the schedule sets no condition, so that each round starts when the previous one ends."""
        return self.every is None and self.window is None and not self.asks_devices

    @property
    def asks_devices(self) -> bool:
        """True if a round waits for devices' reports of new samples or drift."""
        return self.new_samples is not None or self.drift

    @property
    def every_s(self) -> int | None:
        """`every` in seconds; None if it is left out. Raises ValueError if it is no time span."""
        return None if self.every is None else seconds_of_span(self.every, "every")

    @property
    def hours(self) -> tuple[time, time] | None:
        """Start and end of `window`; None if it is left out. Raises ValueError if it is not two times of day.

        A window that does not end later than it starts crosses midnight.
        """
        if self.window is None:
            return None
        found = re.fullmatch(rf"{_TIME} ?- ?{_TIME}", self.window)
        if not found:
            raise ValueError(f'window = "{self.window}": give two times of day, e.g. "01:00-05:00"')
        hour, minute, last_hour, last_minute = map(int, found.groups())
        return time(hour, minute), time(last_hour, last_minute)


def seconds_of_span(text: str, key: str) -> int:
    """Seconds in a time span such as "24h". Raises ValueError that names `key` if it is none."""
    found = re.fullmatch(r"([0-9]{1,9})([smhdw])", text)
    seconds = int(found[1]) * _UNITS[found[2]] if found else 0
    if not 0 < seconds <= _LONGEST_S:
        raise ValueError(f'{key} = "{text}": give a number and s, m, h, d or w, e.g. "24h"')
    return seconds


def _check_zone(name: str) -> None:
    """Raise ValueError if this machine does not know the time zone."""
    from zoneinfo import ZoneInfo

    if name == UTC:
        return
    try:
        ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise ValueError(f'zone = "{name}" is no time zone known here, e.g. "Europe/Berlin"') from None
