"""Finds the fleet that the options of a command mean: a joined one, or one at a broker of the user's own."""

from dataclasses import dataclass
from pathlib import Path

from fleetune.edge_agent.joining.joined_fleet import JoinedFleet, joined_fleet
from fleetune.protocols.errors import SettingError
from fleetune.protocols.wire.transport.mqtt import Broker, parse_broker


@dataclass(frozen=True)
class Membership:
    """A device's place in a fleet.

    Attributes:
        fleet: name of the fleet.
        broker: the fleet's broker, with this device's credentials.
        device: the device's id; None if the options do not say it.
        joined: the fleet as this device has joined it; None with a broker that the options name.
    """

    fleet: str
    broker: Broker
    device: str | None
    joined: JoinedFleet | None = None


@dataclass(frozen=True)
class BrokerOptions:
    """Options with which a command finds its fleet; their names are those of `edge-agent run`."""

    fleet: str | None
    broker: str | None
    device: str | None
    state: Path
    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    def broker_and_fleet(self) -> tuple[Broker | None, str | None]:
        """Return broker and fleet as far as the options name them, for checks that work with less.

        Raises:
            SettingError: an option is wrong.
            StoreError: what was stored at joining cannot be read.
        """
        if self.broker is not None:
            return parse_broker(self.broker, self.ca, self.cert, self.key), self.fleet
        if joined_fleet(self.state, self.fleet) is None:
            return None, self.fleet
        found = self.membership()
        return found.broker, found.fleet

    def membership(self) -> Membership:
        """Return the fleet at the broker of `--broker`; without it, the fleet that the device has joined.

        Raises:
            SettingError: an option is wrong, or the device has joined no such fleet.
            StoreError: what was stored at joining cannot be read.
        """
        if self.broker is not None:
            broker = parse_broker(self.broker, self.ca, self.cert, self.key)
            if self.fleet is None:
                raise SettingError("--fleet is not given; with --broker, name the fleet too")
            return Membership(self.fleet, broker, self.device)
        joined = joined_fleet(self.state, self.fleet)
        if joined is None:
            which = "no fleet" if self.fleet is None else f"no fleet {self.fleet!r}"
            raise SettingError(
                f"this device has joined {which} below {self.state}; join with the line that edge-coordinator"
                " invite prints (edge-agent join LINE), or name a broker of your own with --broker"
            )
        for name in ("ca", "cert", "key"):
            if getattr(self, name) is not None:
                raise SettingError(
                    f"--{name} is for a broker of your own: name it with --broker, or leave it out"
                )
        if self.device not in (None, joined.device):
            raise SettingError(
                f"--device {self.device}: this device has joined fleet {joined.fleet} as {joined.device};"
                " leave out --device, or join with another --state"
            )
        return Membership(joined.fleet, joined.broker, joined.device, joined)
