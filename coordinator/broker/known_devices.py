"""Identities of a broker's devices, and the events by which the broker's side reports to the coordinator."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fleetune.coordinator.broker.broker_log import Refused
from fleetune.protocols.errors import PacketError, PacketForeign
from fleetune.protocols.wire.identity import Identity, KnownBy
from fleetune.protocols.wire.messages import Renewed


@dataclass(frozen=True)
class DevicesChanged:
    """Event: devices joined the fleet, were renamed, or left it.

    `shut_out`: why devices may not connect, e.g. "revoked", by id. It has all such devices of the registry.
    """

    shut_out: Mapping[str, str]


@dataclass(frozen=True)
class BrokerRefused:
    """Event: what the broker has refused since the last such event, with the number of times."""

    counts: dict[Refused, int]


@dataclass
class KnownDevices:
    """The devices of a broker whose users the coordinator cannot look up.

    Attributes:
        known_by: how the coordinator knows all devices of this broker.
    """

    known_by: KnownBy = "claim"

    def identity(self, device: str, name: str) -> Identity:
        """Return the identity of a device that introduced itself with this name, or with ""."""
        return Identity(device, name or device, self.known_by)

    def note_seen(self, device: str, name: str, agent: str) -> None:
        """Store that a device is connected, with the name and the program that it reports."""

    def is_renewal_due(self, device: str) -> bool:  # noqa: ARG002 - these devices have no certificates
        """True if a device's certificate is to be renewed."""
        return False

    def renew(self, requests: Mapping[str, str]) -> dict[str, Renewed | PacketError]:
        """Return the answers to signing requests, by device; this takes a second or more.

        Raises:
            FleetuneError: nothing could be signed.
        """
        return {device: PacketForeign("this broker has no certificates") for device in requests}

    def catch_up(self) -> None:
        """Return when all changes of the registry until now have taken effect."""

    def report_to(self, put: Callable[[Any], None]) -> None:
        """Send events to the coordinator's queue from now on."""
