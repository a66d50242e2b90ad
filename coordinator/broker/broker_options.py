"""Decides from a command's options which broker to use: the user's own broker or the embedded one."""

import ipaddress
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from fleetune.coordinator.broker.credentials import credentials_of
from fleetune.coordinator.broker.embedded_broker import Access, EmbeddedBroker
from fleetune.coordinator.broker.invitation import Invitation
from fleetune.coordinator.broker.restarted_broker import RestartedBroker
from fleetune.coordinator.store.run_folder import BROKER
from fleetune.protocols.errors import SettingError
from fleetune.protocols.wire.identity import KnownBy
from fleetune.protocols.wire.topics import COORDINATOR_USER
from fleetune.protocols.wire.transport.mqtt import Broker, in_url, parse_broker

BROKER_VARIABLE = "FLEETUNE_BROKER"
# options of the embedded broker, and options of the user's own
_EMBEDDED, _TLS = ("bind", "port"), ("ca", "cert", "key")


def origin_of(sources: Mapping[str, str], *, supervised: bool = False) -> str:
    """Return in words where the broker's URL comes from; "" if an embedded broker will be started.

    Args:
        sources: the source of each option of the command: "COMMANDLINE", "ENVIRONMENT" or "DEFAULT".
        supervised: True if a service started this process and set the URL in its environment.

    Raises:
        SettingError: an option of the embedded broker is given together with a URL, or a TLS option without a
            URL.
    """
    source = sources["broker"]
    given = [name for name in (*_EMBEDDED, *_TLS) if sources[name] == "COMMANDLINE"]
    if source == "DEFAULT":
        for option in (name for name in given if name in _TLS):
            raise SettingError(
                f"--{option} is for a broker of your own: name it with --broker, or leave out --{option}"
            )
        return ""
    for option in (name for name in given if name in _EMBEDDED):
        if source == "COMMANDLINE":
            raise SettingError(f"--{option} is for the embedded broker: leave out --{option} or --broker")
        raise SettingError(
            f"--{option} is for the embedded broker, but {BROKER_VARIABLE} in the environment names another: "
            f"unset {BROKER_VARIABLE}, or leave out --{option}"
        )
    if source == "COMMANDLINE":
        return "from --broker"
    return "from the service" if supervised else f"from {BROKER_VARIABLE} in the environment"


def check_broker(
    url: str | None, *, bind: str, port: int, ca: str | None, cert: str | None, key: str | None
) -> Broker | None:
    """Check that the broker's URL is valid, or that an embedded broker can start.

    A command calls this before it creates or removes anything.

    Returns:
        the broker that the URL names; None if an embedded broker will be started.

    Raises:
        SettingError: the URL is invalid.
        TransportError: no broker is installed, or the port is in use.
    """
    if url is None:
        EmbeddedBroker.check(bind, port)
        return None
    return parse_broker(url, ca, cert, key)


def known_by(given: Broker | None) -> KnownBy:
    """Return how the coordinator identifies devices at a broker: by their login or by the name they claim.

    The rules of `edge-coordinator broker-config` bind a device's topics to its login, and give all topics of
    the fleet to the user `coordinator`. The coordinator cannot read the rules of the user's own broker. If it
    logs in as `coordinator`, it assumes these rules. All devices of an embedded broker share one login.
    """
    return "login" if given is not None and given.username == COORDINATOR_USER else "claim"


@contextmanager
def broker_at(
    given: Broker | None, folder: Path, fleet: str, *, bind: str, port: int, origin: str = ""
) -> Iterator[Broker]:
    """Yield the broker to connect to; without `given`, run an embedded broker during this context.

    An embedded broker that ends unexpectedly is restarted. If other machines can reach it, it requires the
    fleet's password. The first printed line names the broker and the option that selected it.

    Args:
        given: the result of `check_broker`.
        folder: the run's folder.
        fleet: name of the fleet.
        bind: address of an embedded broker.
        port: port of an embedded broker.
        origin: the result of `origin_of`.

    Raises:
        TransportError: the embedded broker does not start.
    """
    if given is not None:
        print(f"broker: {given}, {origin}", flush=True)
        Invitation(fleet, given.host, given.port, tls=given.tls, access="own").keep(folder)
        yield given
        return
    credentials = None if _is_loopback(bind) else credentials_of(fleet, folder.parent)
    access = None if credentials is None else Access(fleet, credentials)

    def start(at: int) -> EmbeddedBroker:
        return EmbeddedBroker.start(folder / BROKER, bind=bind, port=at, access=access)

    with closing(RestartedBroker(start, port)) as embedded:
        where = Broker(embedded.broker.host, embedded.broker.port)
        which = f"embedded {embedded.broker.which}, listens on {in_url(bind or '*')}:{where.port}"
        print(f"broker: {which}; no --broker or {BROKER_VARIABLE} is given", flush=True)
        if credentials is None:
            Invitation(fleet, where.host, where.port).keep(folder)
            yield where
            return
        invitation = Invitation(fleet, _address(bind), where.port, access="password")
        invitation.keep(folder)
        _invite(invitation, credentials.join, folder)
        yield Broker(where.host, where.port, username=COORDINATOR_USER, password=credentials.coordinator)


def _invite(invitation: Invitation, password: str, folder: Path) -> None:
    """Print the command with which devices join; print its password only on a terminal.

    Output that is no terminal may go to a journal, which other users can read.
    """
    if sys.stdout.isatty():
        print(f"on each device, run: {invitation.command(password)}", flush=True)
    else:
        print(f"on each device, run the command that `edge-coordinator invite {folder}` prints", flush=True)


def _is_loopback(bind: str) -> bool:
    try:
        return ipaddress.ip_address(bind).is_loopback
    except ValueError:
        return bind == "localhost"


def _address(bind: str) -> str:
    """Return the address at which other machines reach this one. No packet is sent."""
    if bind not in ("", "0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        return bind
    # Addresses reserved for documentation: only the route to them is looked up.
    routes = [(socket.AF_INET6, "2001:db8::1")] if bind == "::" else []
    for family, outside in [*routes, (socket.AF_INET, "192.0.2.1")]:
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect((outside, 9))
            return str(asking.getsockname()[0])
    return socket.gethostname()
