"""Decides from a command's options which broker to use: the user's own broker or the embedded one."""

import ipaddress
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

from fleetune.coordinator.broker.embedded_broker import EmbeddedBroker, choose_broker, claim_ports
from fleetune.coordinator.broker.fleet_listeners import NUM_PORTS
from fleetune.coordinator.broker.known_devices import KnownDevices
from fleetune.coordinator.broker.open_fleet import open_fleet
from fleetune.coordinator.broker.restarted_child import RestartedChild
from fleetune.coordinator.store.run_folder import BROKER
from fleetune.protocols.errors import SettingError
from fleetune.protocols.wire.identity import KnownBy
from fleetune.protocols.wire.topics import COORDINATOR_USER
from fleetune.protocols.wire.transport.mqtt import Broker, in_url, parse_broker

LOOPBACK_PORT, TLS_PORT = 1883, 8883
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


def default_port(bind: str) -> int:
    """Return the embedded broker's port if none is given: that of TLS beyond the loopback."""
    return LOOPBACK_PORT if is_loopback(bind) else TLS_PORT


def check_broker(
    url: str | None, *, bind: str, port: int, ca: str | None, cert: str | None, key: str | None
) -> Broker | None:
    """Check that the broker's URL is valid, or that an embedded broker can start.

    A command calls this before it creates or removes anything.

    Returns:
        the broker that the URL names; None if an embedded broker will be started.

    Raises:
        SettingError: the URL is invalid.
        TransportError: no broker is installed that can serve this address, or a port is in use.
    """
    if url is not None:
        return parse_broker(url, ca, cert, key)
    choose_broker("auto" if is_loopback(bind) else "mosquitto")
    claim_ports(bind, port, 1 if is_loopback(bind) else NUM_PORTS)
    return None


def known_by(given: Broker) -> KnownBy:
    """Return how the coordinator identifies devices at the user's own broker: by login or by claim.

    The rules of `edge-coordinator broker-config` bind a device's topics to its login, and give all topics of
    the fleet to the user `coordinator`. The coordinator cannot read the rules of the user's own broker. If it
    logs in as `coordinator`, it assumes these rules.
    """
    return "login" if given.username == COORDINATOR_USER else "claim"


@contextmanager
def broker_at(
    given: Broker | None, folder: Path, fleet: str, *, bind: str, port: int, origin: str = ""
) -> Iterator[tuple[Broker, KnownDevices]]:
    """Yield the broker to connect to and its devices; without `given`, run an embedded broker meanwhile.

    An embedded broker that ends unexpectedly is restarted. If other machines can reach it, it encrypts, and
    only devices that joined the fleet can connect. The first printed line names the broker and the option
    that selected it.

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
        yield given, KnownDevices(known_by(given))
        return
    if not is_loopback(bind):
        with open_fleet(folder, fleet, bind, port) as opened:
            yield opened
        return

    def start(at: int) -> EmbeddedBroker:
        return EmbeddedBroker.start(folder / BROKER, bind=bind, port=at)

    with closing(RestartedChild("embedded broker", start, port)) as embedded:
        where = Broker(embedded.child.host, embedded.child.port)
        which = f"embedded {embedded.child.which}, listens on {in_url(bind)}:{where.port}"
        print(f"broker: {which}; no --broker or {BROKER_VARIABLE} is given", flush=True)
        yield where, KnownDevices()


def is_loopback(bind: str) -> bool:
    """True if only this machine can connect to the address."""
    try:
        return ipaddress.ip_address(bind).is_loopback
    except ValueError:
        return bind == "localhost"
