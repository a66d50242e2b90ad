"""Simulated devices come and go: `[fleet] availability`, and batteries that end."""

from collections.abc import Collection, Iterable, Iterator

from fleetune.protocols.errors import SettingError
from fleetune.protocols.wire.payloads import run_key
from fleetune.tools.simulator.simulated_device import Player

MOST_STRETCHES = 10_000  # between two rounds


def too_few_left(players: Collection[Player], quorum: int) -> str | None:
    """Why no round can follow; None: one can. Nobody charges a simulated battery."""
    flat = sum(player.is_flat for player in players)
    if len(players) - flat >= quorum:
        return None
    return f"the batteries of {flat} of {len(players)} devices are empty, and round.quorum is {quorum}"


class Presence:
    """Who is there, drawn anew for every stretch of `deadline_s`.

    Args:
        availability: chance that a device is there.
        seed: of the run.

    Attributes:
        idle_stretches: without a round, though one was due.
    """

    def __init__(self, availability: float, seed: int) -> None:
        self._availability = availability
        self._seed = seed
        self.idle_stretches = 0

    @property
    def is_whole(self) -> bool:
        """Everybody is always there."""
        return self._availability == 1

    def draw(self, stretch: int, players: Iterable[Player], *, is_due: bool) -> Iterator[tuple[Player, bool]]:
        """Each device, and whether it is there.

        Raises:
            SettingError: it was never enough for a round.
        """
        self.idle_stretches += int(is_due)
        if self.idle_stretches > MOST_STRETCHES:
            raise SettingError(
                f"fleet.availability = {self._availability:g}: no round was closed in {MOST_STRETCHES} times"
                " round.deadline_s; raise it, or lower round.quorum"
            )
        there = tuple(players)
        chances = run_key(self._seed).child("availability", stretch).uniform(len(there))
        for chance, player in zip(chances, there, strict=True):
            yield player, bool(chance < self._availability)
