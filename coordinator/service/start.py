"""Beginning a service: its folder held, its broker known, its runs looked after until a signal comes."""

from collections.abc import Mapping
from pathlib import Path

from fleetune.coordinator.broker.broker_options import BROKER_VARIABLE
from fleetune.coordinator.service.run_process import Launcher
from fleetune.coordinator.service.service import RUNS, Service, held
from fleetune.coordinator.service.supervisor import Supervisor
from fleetune.protocols.wire.transport.mqtt import parse_broker


def serve_folder(
    folder: Path,
    *,
    broker: str | None,
    bind: str,
    port: int,
    tls: Mapping[str, str | None],
    origin: str = "",
) -> None:
    """Serve all runs of a folder until this process is told to end.

    Args:
        folder: with their run.toml files.
        broker: url of the broker of all of them; None: each fleet has an embedded one.
        bind: address of these.
        port: of the first of these; 0: free ones.
        tls: `ca`, `cert` and `key` of `serve`.
        origin: where the url comes from, see `broker_options.origin_of`.

    Raises:
        SettingError: there is no such folder, another service is at work in it, or the url is none.
        StoreError: the folder cannot be written.
    """
    options: list[str] = []
    for name, file in tls.items():
        options += [] if file is None else [f"--{name}", file]
    where = "an embedded one for each fleet"
    if broker is not None:
        where = f"{parse_broker(broker)}, {origin}"
    with held(folder) as own:
        environment = {} if broker is None else {BROKER_VARIABLE: broker}  # in a command line it would show
        launcher = Launcher(folder / RUNS, own, bind, port, tuple(options), environment)
        service = Service(folder, Supervisor(folder / RUNS, launcher))
        service.stop_at_signals()
        print(f"broker: {where}", flush=True)
        print(f"service of {folder}: the runs' logs are in {own}", flush=True)
        service.run()
