"""What the run controller leaves to whoever carries payloads: simulation or fleet."""

from collections.abc import Callable
from dataclasses import dataclass

from fleetune.coordinator.rounds.events import Declined, Miss
from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.protocols.errors import PacketNotFinite
from fleetune.protocols.skeletons.method import DeviceId
from fleetune.protocols.wire.messages import TransferKey


@dataclass(frozen=True)
class Send:
    """Give the device the payload that `make` returns (made when it is sent, not before).

    `make` raises PacketNotFinite when the task is not fit to be sent; then tell the run controller
    `declined`.
    """

    device: DeviceId
    transfer_key: TransferKey
    make: Callable[[], bytes]

    def declined(self, problem: PacketNotFinite) -> Declined:
        """As if the device had tried it."""
        return Declined(
            self.device, self.transfer_key.round, self.transfer_key.attempt, str(problem), diverged=True
        )


@dataclass(frozen=True)
class Reject:
    """Tell the device that its update does not count."""

    device: DeviceId
    reason: str


@dataclass(frozen=True)
class Closed:
    """A round is aggregated and written down."""

    record: RoundRecord


@dataclass(frozen=True)
class Abandoned:
    """An attempt at a round was given up; `absent` are those that were asked and had not replied."""

    round: int
    attempt: int
    reason: Miss
    absent: tuple[DeviceId, ...]


@dataclass(frozen=True)
class Finished:
    """The run is over."""

    reason: str


Order = Send | Reject | Closed | Abandoned | Finished
