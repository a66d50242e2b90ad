"""Opens a fleet to other machines: certificates, broker with TLS, join server, and watch of the registry."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

from fleetune.coordinator.broker.embedded_broker import EmbeddedBroker, claim_ports
from fleetune.coordinator.broker.fleet_listeners import NUM_PORTS, FleetListeners
from fleetune.coordinator.broker.fleet_watch import FleetWatch
from fleetune.coordinator.broker.known_devices import KnownDevices
from fleetune.coordinator.broker.restarted_child import RestartedChild
from fleetune.coordinator.fleet.access_files import write_access_files
from fleetune.coordinator.fleet.authority import Authority
from fleetune.coordinator.fleet.fleet_address import FleetAddress, names_of_this_machine
from fleetune.coordinator.fleet.fleet_folder import FleetFolder
from fleetune.coordinator.fleet.join_server import start_join_server
from fleetune.coordinator.fleet.registry import Registry
from fleetune.coordinator.run.child_process import in_child_process
from fleetune.coordinator.store.folder_lock import claim, is_claimed
from fleetune.coordinator.store.run_folder import BROKER
from fleetune.protocols.errors import StoreError
from fleetune.protocols.files import make_folder
from fleetune.protocols.wire.transport.mqtt import Broker, in_url


@contextmanager
def open_fleet(folder: Path, fleet: str, bind: str, port: int) -> Iterator[tuple[Broker, KnownDevices]]:
    """Yield the coordinator's address of a fleet's broker, and the fleet's devices; run both meanwhile.

    Args:
        folder: the run's folder. The fleet's own folder is next to it.
        fleet: name of the fleet.
        bind: address to listen on.
        port: the first of three ports; 0 for free ones.

    Raises:
        TransportError: broker or join server does not start.
        StoreError: another coordinator serves the fleet, or a file of it cannot be read or written.
    """
    files = FleetFolder.of(fleet, folder.parent)
    with served_once(files):
        yield from _opened(folder, files, bind, port)


@contextmanager
def served_once(files: FleetFolder) -> Iterator[None]:
    """Hold the right to serve a fleet beyond the loopback. Raises StoreError: another process holds it."""
    held = files.path / "served"
    make_folder(held)
    if is_claimed(held):
        raise StoreError(
            f"another coordinator serves fleet {files.fleet}: stop it first, or serve another fleet (--fleet)"
        )
    with claim(held):
        yield


def _opened(folder: Path, files: FleetFolder, bind: str, port: int) -> Iterator[tuple[Broker, KnownDevices]]:
    port, hosts, fleet = claim_ports(bind, port, NUM_PORTS), hosts_of(bind), files.fleet
    _say_upgrade(files)
    # In a child process, which alone imports `cryptography`.
    in_child_process("the fleet's certificates", make_certificates, files, hosts)
    FleetAddress(tuple(hosts), port, port + 1, port + 2).write(files)
    listeners = FleetListeners(files, bind, port)

    def start(at: int) -> EmbeddedBroker:
        return EmbeddedBroker.start(folder / BROKER, port=at, fleet=listeners)

    with ExitStack() as running:
        broker = running.enter_context(closing(RestartedChild("embedded broker", start, 0)))
        joining = RestartedChild("join server", lambda at: start_join_server(files, bind, at), port + 2)
        running.enter_context(closing(joining))
        watch = running.enter_context(closing(FleetWatch(listeners=listeners, broker=broker)))
        where = f"{in_url(bind)}:{port} to {port + 2}"
        print(f"broker: embedded {broker.child.which} with TLS, listens on {where}", flush=True)
        print(f"to let a device join, run: edge-coordinator invite {fleet}", flush=True)
        yield watch.connection, watch


def make_certificates(files: FleetFolder, hosts: list[str]) -> None:
    """Make what is missing or due of a fleet's authority, server certificate and access files.

    Raises:
        StoreError: a file is damaged, or cannot be read or written.
    """
    authority = Authority.open(files, time.time())
    authority.rotate_before_end(time.time())
    authority.renew_server(hosts, time.time())
    with Registry.open(files.registry) as registry:
        write_access_files(authority, registry, time.time())


def hosts_of(bind: str) -> list[str]:
    """Return this machine's names and addresses, if it listens at `bind`; the first is for invitations."""
    names = names_of_this_machine()
    if bind not in ("", "0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        return [bind, *names]
    # Addresses reserved for documentation: only the route to them is looked up. No packet is sent.
    routes = [(socket.AF_INET6, "2001:db8::1")] if bind == "::" else []
    for family, outside in [*routes, (socket.AF_INET, "192.0.2.1")]:
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect((outside, 9))
            return [str(asking.getsockname()[0]), *names]
    return names


def _say_upgrade(files: FleetFolder) -> None:
    """Say that devices join anew, and that the old password can go, if the fleet had one for all devices."""
    old = files.path.with_name(f"{files.fleet}.json")
    if not old.exists():
        return
    print(f"delete {old}: it holds a password that is not used any more", flush=True)
    if not files.registry.exists():
        print(
            "devices join once: this fleet has no password any more; run `edge-coordinator invite"
            f" {files.fleet}`, then on each device `edge-agent join LINE --device NAME`, with its old name",
            flush=True,
        )
