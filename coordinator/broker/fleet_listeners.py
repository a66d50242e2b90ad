"""The listeners by which the devices of a fleet reach its embedded broker (mosquitto) from other machines.

    port        who connects there
    P           devices with a certificate, by TLS; the certificate's common name is user and client id
    P + 1       devices with a secret, by TLS; the user is the client id too
    P + 2       devices that join, by HTTPS (the join server, not the broker)
    a free one  the coordinator, on the loopback only, with a password that nobody else gets

A device cannot choose its client id, so it cannot take another device's connection.
"""

import secrets
from dataclasses import dataclass, field
from pathlib import Path

from fleetune.coordinator.broker.access_rules import coordinator_rules, device_rules
from fleetune.coordinator.broker.broker_log import BrokerNews
from fleetune.coordinator.fleet.fleet_folder import FleetFolder
from fleetune.coordinator.fleet.secret_hash import hash_of
from fleetune.coordinator.tied_child import most_open_files
from fleetune.protocols.errors import TransportError
from fleetune.protocols.files import write_atomically
from fleetune.protocols.wire.topics import COORDINATOR_USER

# mosquitto disconnects the sender of a message for which it has no memory left. TLS takes more beside it.
MAX_MEMORY_BYTES = 192 * 2**20
MAX_CERTIFICATE_CONNECTIONS, MAX_SECRET_CONNECTIONS = 4000, 1000  # also those without an identity yet
OTHER_FILES = 64  # that mosquitto opens beside the devices' connections, e.g. the coordinator's connections
NUM_PORTS = 3  # P, P + 1 and P + 2


@dataclass(frozen=True)
class FleetListeners:
    """The listeners of one fleet.

    Attributes:
        files: the fleet's folder, with certificates, revocation list and passwords.
        bind: address of the devices' listeners.
        news: what the broker refused, and who connected.
        port: port P.
        password: the coordinator's password.
    """

    files: FleetFolder
    bind: str
    port: int
    password: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    news: BrokerNews = field(default_factory=BrokerNews, repr=False)

    def settings(self, place: Path, loopback_port: int) -> list[str]:
        """Write the files that mosquitto reads, and return the lines of `mosquitto.conf` about listeners.

        The coordinator's listener is the last one. Once it accepts connections, all others do.
        """
        fleet = self.files.fleet
        own = {
            "coordinator.rules": coordinator_rules(fleet),
            "coordinator.password": f"{COORDINATOR_USER}:{hash_of(self.password)}\n",
            "device.rules": device_rules(fleet),
        }
        for name, content in own.items():
            write_atomically(place / name, content.encode(), durable=False)
        self.refresh(place)
        tls = [
            "allow_anonymous false",
            "use_username_as_clientid true",
            f"acl_file {place / 'device.rules'}",
            f"certfile {place / self.files.server.name}",
            f"keyfile {place / self.files.server_key.name}",
            "tls_version tlsv1.2",  # and later
            "max_qos 1",  # the broker would store an incomplete message of QoS 2
        ]
        with_certificate, with_secret = max_connections(most_open_files())
        return [
            "per_listener_settings true",
            f"memory_limit {MAX_MEMORY_BYTES}",
            f"listener {self.port} {named(self.bind)}".rstrip(),
            *tls,
            f"max_connections {with_certificate}",
            f"cafile {place / self.files.authority.name}",
            f"crlfile {place / self.files.revoked.name}",
            "require_certificate true",
            "use_identity_as_username true",
            f"listener {self.port + 1} {named(self.bind)}".rstrip(),
            *tls,
            f"max_connections {with_secret}",
            f"password_file {place / self.files.passwords.name}",
            f"listener {loopback_port} 127.0.0.1",
            "allow_anonymous false",
            f"password_file {place / 'coordinator.password'}",
            f"acl_file {place / 'coordinator.rules'}",
        ]

    def refresh(self, place: Path) -> None:
        """Copy the fleet's files to a folder that mosquitto's user can read. Raises TransportError."""
        for file in self.sources:
            _copy(file, place / file.name)

    @property
    def sources(self) -> tuple[Path, ...]:
        """The fleet's files that mosquitto reads again at each SIGHUP."""
        one = self.files
        return one.authority, one.server, one.server_key, one.revoked, one.passwords


def max_connections(open_files: int) -> tuple[int, int]:
    """Return the most connections with a certificate and with a secret, so that the coordinator has room.

    Args:
        open_files: how many files and connections the broker may open; 0 if unknown.
    """
    most = MAX_CERTIFICATE_CONNECTIONS + MAX_SECRET_CONNECTIONS
    share = min(1.0, max(open_files - OTHER_FILES, 2) / most) if open_files else 1.0
    return int(MAX_CERTIFICATE_CONNECTIONS * share), max(int(MAX_SECRET_CONNECTIONS * share), 1)


def _copy(file: Path, to: Path) -> None:
    """Copy a file so that only the folder's owner can read it. Raises TransportError."""
    try:
        write_atomically(to, file.read_bytes(), durable=False)
    except OSError as problem:
        raise TransportError(f"cannot read {file}: {problem.strerror}") from None


def named(bind: str) -> str:
    """Return the address for mosquitto's `listener` line; "" listens on all IPv4 and IPv6 addresses.

    In mosquitto, `::` alone means IPv6 only.
    """
    return "" if bind == "::" else bind
