"""Simulated devices come and go: `[fleet] availability`, and batteries that end."""

from collections.abc import Collection, Iterable, Iterator
from itertools import islice

from fleetune.protocols.errors import SettingError
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.wire.payloads import run_key
from fleetune.tools.simulator.simulated_device import SimulatedDevice

MAX_IDLE_PERIODS = 10_000  # between two rounds


class Availability:
    """Who is there, drawn anew for every stretch of `deadline_s`.

    Args:
        settings: of the run, which say how likely a device is there, and how many a round needs.
        seed: of the run.

    Attributes:
        idle_stretches: without a round, though one was due.
    """

    def __init__(self, settings: RunSettings, seed: int) -> None:
        self._availability, self._quorum = settings.fleet.availability, settings.round.quorum
        self._seed = seed
        self.idle_stretches = 0

    @property
    def is_whole(self) -> bool:
        """Everybody is always there."""
        return self._availability == 1

    def draw(
        self, stretch: int, players: Iterable[SimulatedDevice], *, is_due: bool
    ) -> Iterator[tuple[SimulatedDevice, bool]]:
        """Each device, and whether it is there.

        Raises:
            SettingError: it was never enough for a round.
        """
        self.idle_stretches += int(is_due)
        if self.idle_stretches > MAX_IDLE_PERIODS:
            raise SettingError(
                f"fleet.availability = {self._availability:g}: no round closed in {MAX_IDLE_PERIODS} times"
                " round.deadline_s; raise it, or lower round.quorum"
            )
        there = tuple(players)
        chances = run_key(self._seed).child("availability", stretch).uniform(len(there))
        for chance, player in zip(chances, there, strict=True):
            yield player, bool(chance < self._availability)

    def why_over(self, players: Collection[SimulatedDevice]) -> str | None:
        """Why no round can follow: too many batteries are empty, and nobody charges them; None: one can."""
        left = (player for player in players if not player.is_flat)
        if len(list(islice(left, self._quorum))) == self._quorum:  # of many devices a few are looked at
            return None
        flat, quorum = sum(player.is_flat for player in players), self._quorum
        return f"the batteries of {flat} of {len(players)} devices are empty, and round.quorum is {quorum}"
