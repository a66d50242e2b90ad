"""Where devices reach a fleet, as the last `edge-coordinator serve` found it."""

import socket
from contextlib import suppress
from typing import Self

import msgspec
import psutil
from msgspec import Struct

from fleetune.coordinator.fleet.fleet_folder import FleetFolder
from fleetune.protocols.errors import StoreError
from fleetune.protocols.files import write_atomically


class FleetAddress(Struct, frozen=True):
    """The address of a fleet that is reached over TLS.

    Attributes:
        hosts: names and addresses of the coordinator's machine; the first is for invitations.
        port: the broker's port for devices with a certificate.
        secret_port: the broker's port for devices with a user name and a secret.
        join_port: the port of the join exchange.
    """

    hosts: tuple[str, ...]
    port: int
    secret_port: int
    join_port: int

    @classmethod
    def read(cls, folder: FleetFolder) -> Self:
        """Return what `write` wrote. Raises StoreError."""
        try:
            return msgspec.json.decode(folder.address.read_bytes(), type=cls)
        except FileNotFoundError:
            raise StoreError(
                f"fleet {folder.fleet}: no coordinator has opened it to the network; start edge-coordinator"
                " serve --bind 0.0.0.0"
            ) from None
        except OSError as problem:
            raise StoreError(f"cannot read {folder.address}: {problem.strerror}") from None
        except msgspec.MsgspecError:
            raise StoreError(
                f"{folder.address} is damaged; start edge-coordinator serve again, which rewrites it"
            ) from None

    def write(self, folder: FleetFolder) -> None:
        """Write the address into the fleet's folder. Raises StoreError."""
        write_atomically(folder.address, msgspec.json.encode(self))


def names_of_this_machine() -> list[str]:
    """Return the names and addresses under which other machines may know this one, best ones first."""
    name = socket.gethostname()
    found = [name, *([] if "." in name else [f"{name}.local"])]  # `.local`: multicast DNS
    with suppress(OSError):
        for interface in sorted(psutil.net_if_addrs().items()):
            found += [one.address for one in interface[1] if one.family in (socket.AF_INET, socket.AF_INET6)]
    return [*(one for one in found if "%" not in one), "localhost"]  # `%`: an address of one link
