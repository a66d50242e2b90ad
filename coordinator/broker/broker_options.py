"""Where the broker is, from the command line: a broker of one's own or the embedded one."""

import ipaddress
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fleetune.coordinator.broker.credentials import credentials_of
from fleetune.coordinator.broker.embedded_broker import Access, EmbeddedBroker
from fleetune.coordinator.store.run_folder import BROKER
from fleetune.protocols.wire.topics import COORDINATOR_USER, JOIN_USER
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

    Beyond the loopback it lets in only who has the fleet's password, which is made once and printed.

    Raises:
        TransportError: the embedded broker does not start.
    """
    if given is not None:
        yield given
        return
    if _is_loopback(bind):
        with EmbeddedBroker.start(folder / BROKER, bind=bind, port=port) as embedded:
            yield Broker(embedded.host, embedded.port)
        return
    credentials = credentials_of(fleet, folder.parent)
    access = Access(fleet, credentials)
    with EmbeddedBroker.start(folder / BROKER, bind=bind, port=port, access=access) as embedded:
        print(join_words(fleet, _address(bind), embedded.port, credentials.join), flush=True)
        yield Broker(
            embedded.host, embedded.port, username=COORDINATOR_USER, password=credentials.coordinator
        )


def join_words(fleet: str, host: str, port: int, password: str) -> str:
    """The agents' whole command. In the environment the password shows in no list of processes."""
    where = f"FLEETUNE_BROKER=mqtt://{JOIN_USER}:{password}@{host}:{port}"
    return f"on each device: {where} edge-agent run --fleet {fleet} --device NAME --data npz:FILE"


def _is_loopback(bind: str) -> bool:
    try:
        return ipaddress.ip_address(bind).is_loopback
    except ValueError:
        return bind == "localhost"


def _address(bind: str) -> str:
    """The address by which other machines reach this one; nothing is sent to find it out."""
    if bind not in ("", "0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        return bind
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(("192.0.2.1", 9))  # an address for documentation: only the route is looked up
            return str(asking.getsockname()[0])
        except OSError:
            return socket.gethostname()
