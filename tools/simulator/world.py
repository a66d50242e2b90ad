"""When a simulated world begins and ends."""

from dataclasses import dataclass

from fleetune.coordinator.rounds.policies.civil_time import instant
from fleetune.coordinator.run.run_clock import schedule_of
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.schedule import DAY_S, seconds_of_day

FIRST_DAY = 20_454  # since 1970: 1 January 2026


@dataclass(frozen=True)
class World:
    """When it begins and ends.

    Attributes:
        ahead_s: the time of day when its clock begins, in seconds since 1970.
        ends_s: after so many seconds no round opens any more; None: when its rounds are done.
    """

    ahead_s: float = 0.0
    ends_s: float | None = None


def world_of(settings: RunSettings) -> World:
    """What [fleet] says of it."""
    schedule, fleet = schedule_of(settings.schedule), settings.fleet
    begins = instant(FIRST_DAY, seconds_of_day(fleet.starts_at, "starts_at"), schedule.zone)
    return World(begins, None if fleet.days is None else fleet.days * DAY_S)
