"""Finds the fleet that the options of a command mean: a joined one, or one at a broker of the user's own."""

from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from fleetune.edge_agent.joining.joined_fleet import JoinedFleet, joined_fleet
from fleetune.protocols.errors import SettingError
from fleetune.protocols.wire.transport.mqtt import Broker, parse_broker
from fleetune.protocols.wire.transport.tls import is_fleet_authority


@dataclass(frozen=True)
class Membership:
    """A device's place in a fleet.

    Attributes:
        fleet: name of the fleet.
        broker: the fleet's broker, with this device's credentials.
        device: the device's id; None if the options do not say it.
        joined: the fleet as this device has joined it; None with a broker of the owner's own.
        is_named: True if `--broker` names the broker's address.
    """

    fleet: str
    broker: Broker
    device: str | None
    joined: JoinedFleet | None = None
    is_named: bool = False

    def present_broker(self) -> Broker:
        """Return the broker at its present address: another `join` may have changed it. Raises StoreError."""
        if self.joined is None or self.is_named:
            return self.broker
        return self.joined.stored_again().broker


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
        named = self._named()
        if self._joined(named) is None:
            return named, self.fleet
        found = self.membership()
        return found.broker, found.fleet

    def membership(self) -> Membership:
        """Return the fleet that the device has joined, or the one at a broker of `--broker`.

        If `--broker` is only the address of a TLS listener, a joined fleet keeps its credentials: its
        coordinator has moved.

        Raises:
            SettingError: an option is wrong, or the device has joined no such fleet.
            StoreError: what was stored at joining cannot be read.
        """
        named = self._named()
        joined = self._joined(named)
        if joined is not None:
            self._check_joined(joined)
            if named is None:
                return Membership(joined.fleet, joined.broker, joined.device, joined)
            there = replace(joined, host=named.host, port=named.port)
            return Membership(joined.fleet, there.broker, joined.device, joined, is_named=True)
        if named is None:
            which = "no fleet" if self.fleet is None else f"no fleet {self.fleet!r}"
            raise SettingError(
                f"this device has joined {which} below {self.state}; join with the line that edge-coordinator"
                " invite prints (edge-agent join LINE), or name another broker: --broker localhost for a"
                " fleet on this machine, or your own"
            )
        if self.fleet is None:
            raise SettingError("--fleet is not given; with --broker, name the fleet too")
        return Membership(self.fleet, named, self.device)

    def _named(self) -> Broker | None:
        """Return the broker of `--broker`. Raises SettingError."""
        if self.broker is None:
            return None
        named = parse_broker(self.broker, self.ca, self.cert, self.key)
        if named.username and named.ca and self.fleet and is_fleet_authority(named.ca, self.fleet):
            # a device with a secret: the fleet's broker takes the client id from the user, so the second
            # connection needs a user of its own
            return msgspec.structs.replace(named, joined=True)
        return named

    def _joined(self, named: Broker | None) -> JoinedFleet | None:
        """Return the joined fleet that the options mean. Raises SettingError or StoreError."""
        if named is None or named == Broker(named.host, named.port, tls=True):
            return joined_fleet(self.state, self.fleet)
        return None

    def _check_joined(self, joined: JoinedFleet) -> None:
        """Check the other options. Raises SettingError."""
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
