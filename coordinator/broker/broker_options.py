"""Where the broker is, from the command line: a broker of one's own or the embedded one."""

import ipaddress
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fleetune.coordinator.broker.credentials import credentials_of
from fleetune.coordinator.broker.embedded_broker import Access, EmbeddedBroker
from fleetune.coordinator.broker.invitation import Invitation
from fleetune.coordinator.store.run_folder import BROKER
from fleetune.protocols.wire.topics import COORDINATOR_USER
from fleetune.protocols.wire.transport.mqtt import Broker, parse_broker


def check_broker(
    url: str | None, *, bind: str, port: int, ca: str | None, cert: str | None, key: str | None
) -> Broker | None:
    """See to it, before anything is begun or removed for a run, that it will have a broker.

    Returns:
        The broker that the url names; None: an embedded one is to be started.

    Raises:
        SettingError: the url is none.
        TransportError: no broker is installed, or the port is taken.
    """
    if url is None:
        EmbeddedBroker.check(bind, port)
        return None
    return parse_broker(url, ca, cert, key)


@contextmanager
def broker_at(given: Broker | None, folder: Path, fleet: str, *, bind: str, port: int) -> Iterator[Broker]:
    """The broker to connect to; without a `given` one an embedded broker runs as long as this context.

    Beyond the loopback it asks for the fleet's password, which is made once.

    Raises:
        TransportError: the embedded broker does not start.
    """
    if given is not None:
        Invitation(fleet, given.host, given.port, tls=given.tls, access="own").keep(folder)
        yield given
        return
    if _is_loopback(bind):
        with EmbeddedBroker.start(folder / BROKER, bind=bind, port=port) as embedded:
            Invitation(fleet, embedded.host, embedded.port).keep(folder)
            yield Broker(embedded.host, embedded.port)
        return
    credentials = credentials_of(fleet, folder.parent)
    access = Access(fleet, credentials)
    with EmbeddedBroker.start(folder / BROKER, bind=bind, port=port, access=access) as embedded:
        invitation = Invitation(fleet, _address(bind), embedded.port, access="password")
        invitation.keep(folder)
        _invite(invitation, credentials.join, folder)
        yield Broker(
            embedded.host, embedded.port, username=COORDINATOR_USER, password=credentials.coordinator
        )


def _invite(invitation: Invitation, password: str, folder: Path) -> None:
    """Print the join line on a terminal only: anything else may be a journal that others read."""
    if sys.stdout.isatty():
        print(f"on each device: {invitation.command(password)}", flush=True)
    else:
        print(f"on each device: what `edge-coordinator invite {folder}` prints", flush=True)


def _is_loopback(bind: str) -> bool:
    try:
        return ipaddress.ip_address(bind).is_loopback
    except ValueError:
        return bind == "localhost"


def _address(bind: str) -> str:
    """The address by which other machines reach this one; nothing is sent to find it out."""
    if bind not in ("", "0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        return bind
    # Addresses for documentation: only the route to them is looked up.
    routes = [(socket.AF_INET6, "2001:db8::1")] if bind == "::" else []
    for family, outside in [*routes, (socket.AF_INET, "192.0.2.1")]:
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect((outside, 9))
            return str(asking.getsockname()[0])
    return socket.gethostname()
