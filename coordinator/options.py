"""Where the broker is, from the command line: a broker of one's own or the embedded one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import replace

from coordinator.broker import EmbeddedBroker
from coordinator.run_folder import BROKER
from protocols.transport.mqtt import Broker, parse_broker


@contextmanager
def broker_at(
    url: str | None,
    folder: Path,
    *,
    bind: str,
    port: int,
    ca: str | None,
    cert: str | None,
    key: str | None,
) -> Iterator[Broker]:
    """The broker to connect to; without a `url` an embedded one runs as long as this context.

    Raises:
        SettingError: the url is none.
        TransportError: the embedded broker does not start.
    """
    if url is not None:
        broker = parse_broker(url)
        yield replace(broker, ca=ca, cert=cert, key=key, tls=broker.tls or ca is not None)
        return
    with EmbeddedBroker.start(folder / BROKER, bind=bind, port=port) as embedded:
        yield Broker(embedded.host, embedded.port)
