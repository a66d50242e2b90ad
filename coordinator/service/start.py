"""Starts a service: locks its folder, and supervises its runs until a signal arrives."""

import logging
from collections.abc import Mapping
from pathlib import Path

from fleetune.coordinator.broker.broker_options import BROKER_VARIABLE, is_loopback
from fleetune.coordinator.broker.embedded_broker import choose_broker
from fleetune.coordinator.service.run_process import Launcher
from fleetune.coordinator.service.service import RUNS, Service, held
from fleetune.coordinator.service.supervisor import Supervisor
from fleetune.protocols.wire.transport.mqtt import parse_broker

log = logging.getLogger(__name__)


def serve_folder(
    folder: Path,
    *,
    broker: str | None,
    bind: str,
    port: int,
    tls: Mapping[str, str | None],
    origin: str = "",
) -> None:
    """Serve all runs of a folder until this process gets a signal to end.

    Args:
        folder: the folder with run.toml files.
        broker: the URL of one broker for all runs; None starts an embedded broker for each fleet.
        bind: the address of the embedded brokers.
        port: the port of the first embedded broker; 0 for free ports.
        tls: the options `ca`, `cert` and `key` of `serve`.
        origin: where the broker's URL comes from, in words; see `broker_options.origin_of`.

    Raises:
        SettingError: there is no such folder, another service uses it, or the URL is wrong.
        StoreError: the folder cannot be written.
        TransportError: no broker is installed that can serve this address.
    """
    options: list[str] = []
    for name, file in tls.items():
        options += [] if file is None else [f"--{name}", file]
    where = "an embedded one for each fleet"
    if broker is not None:
        where = f"{parse_broker(broker)}, {origin}"
    if broker is None:
        choose_broker("auto" if is_loopback(bind) else "mosquitto")
    with held(folder) as own:
        # in the command line, other users would see its password
        environment = {} if broker is None else {BROKER_VARIABLE: broker}
        launcher = Launcher(folder / RUNS, own, bind, port, tuple(options), environment)
        service = Service(folder, Supervisor(folder / RUNS, launcher))
        service.stop_at_signals()
        log.info("broker: %s", where)
        log.info("service of %s: the runs' logs are in %s", folder, own)
        service.run()
