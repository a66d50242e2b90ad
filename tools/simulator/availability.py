"""Availability of simulated devices: random connections (`[fleet] availability`) and empty batteries."""

from collections.abc import Iterator
from itertools import islice

from fleetune.protocols.errors import SettingError
from fleetune.protocols.wire.payloads import run_key
from fleetune.tools.simulator.simulated_device import Fleet, SimulatedDevice

MAX_IDLE_PERIODS = 10_000  # maximum number of periods between two rounds


class Availability:
    """Draws which devices are connected, for every period of `round.deadline_s`.

    Args:
        chance: probability that a device is connected, 0..1.
        quorum: devices that a round needs.
        seed: seed of the run.

    Attributes:
        idle_periods: number of periods, since the last round closed, in which a round was due.
    """

    def __init__(self, chance: float, quorum: int, seed: int) -> None:
        self._chance, self._quorum, self._seed = chance, quorum, seed
        self.idle_periods = 0

    def note_closed_round(self) -> None:
        """Reset the count of idle periods."""
        self.idle_periods = 0

    def restore(self, idle_periods: int) -> None:
        """Restore a stored count."""
        self.idle_periods = idle_periods

    @property
    def is_whole(self) -> bool:
        """True if all devices are always connected."""
        return self._chance == 1

    def draw(self, period: int, fleet: Fleet, *, is_due: bool) -> Iterator[tuple[SimulatedDevice, bool]]:
        """Yield each device and whether it is connected in this period.

        Args:
            period: number of the period, from 0.
            fleet: the fleet's devices.
            is_due: True if nothing but missing devices delays the next round.

        Raises:
            SettingError: too few devices for a round in too many periods.
        """
        self.idle_periods += int(is_due)
        if self.idle_periods > MAX_IDLE_PERIODS:
            raise SettingError(
                f"fleet.availability = {self._chance:g}: no round was closed in {MAX_IDLE_PERIODS} times"
                " round.deadline_s; raise it, or lower round.quorum"
            )
        chances = run_key(self._seed).child("availability", period).uniform(len(fleet))
        for chance, device in zip(chances, fleet, strict=True):
            yield device, bool(chance < self._chance)

    def why_over(self, fleet: Fleet) -> str | None:
        """Return why no further round is possible, because too many batteries are empty; else None."""
        charged = (device for device in fleet if not device.is_flat)
        if len(list(islice(charged, self._quorum))) == self._quorum:  # lazy: stops after few of many devices
            return None
        empty = f"{sum(device.is_flat for device in fleet)} of {len(fleet)} devices are empty"
        return f"the batteries of {empty}, and round.quorum is {self._quorum}"
