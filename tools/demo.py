"""make demo: a broker, a coordinator and six agents train together on this machine, as separate processes.

The six agents keep running. The coordinator is started three times, once for each method. At the end a table
and a picture show what each device gained. All bytes are counted on the wire.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from fleetune.coordinator.broker.embedded_broker import EmbeddedBroker
from fleetune.coordinator.metrics.summary import read_summary
from fleetune.coordinator.reports.report import write_report
from fleetune.coordinator.reports.tables import device_table, run_table
from fleetune.coordinator.store.run_store import RunStore
from fleetune.protocols.errors import FleetuneError
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.run_toml import read_run
from fleetune.tools.simulator.device_specs import DeviceSpec, device_specs
from fleetune.tools.simulator.write_device_files import write_device_files

RUN_FILE = Path(__file__).with_name("demo.toml")
FOLDER = Path("runs") / "demo"
RIVALS = ("local-only", "fedavg")

console = Console()


def main() -> None:
    settings = read_run(RUN_FILE)
    devices = device_specs(settings.fleet, settings.run.seed)
    console.rule("[bold]Fleetune demo")
    console.print(f"partitioning {settings.data.source} over {len(devices)} devices ...")
    list(write_device_files(settings, FOLDER / "shares"))
    with EmbeddedBroker.start(FOLDER / "broker") as broker:
        address = f"{broker.host}:{broker.port}"
        console.print(f"broker      {broker.which} at {address}, process {broker.pid}; logs in {FOLDER}")
        with _agents(devices, address):
            for method in (*RIVALS, settings.method["name"]):
                console.rule(f"{method}, over MQTT")
                _coordinate(method, address)
    _show(settings, devices)


@contextmanager
def _agents(devices: list[DeviceSpec], broker: str) -> Iterator[None]:
    """Run an agent process for each device, with its part of the data and its board's profile."""
    processes = []
    for device in devices:
        log = FOLDER / f"{device.name}.log"
        command = [
            sys.executable,
            "-P",
            "-m",
            "fleetune.edge_agent.cli",
            "run",
            "--fleet",
            "demo",
            "--broker",
            broker,
        ]
        command += ["--device", device.name, "--board", device.board.name]
        command += ["--data", f"npz:{FOLDER / 'shares' / device.name}.npz", "--state", str(FOLDER / "state")]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        processes.append(process)
        console.print(f"agent       {device.name} as {device.board.name}, process {process.pid}")
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(20)


def _coordinate(method: str, broker: str) -> None:
    """Run the coordinator as a process; its live view goes to this terminal."""
    command = [sys.executable, "-P", "-m", "fleetune.coordinator.cli", "serve", str(RUN_FILE), "--fresh"]
    command += ["--broker", broker, "--fleet", "demo", "--runs", str(FOLDER)]
    command += ["--set", f"run.name={method}", "--set", f"method.name={method}"]
    environment = {**os.environ, "COLUMNS": str(console.width)}
    if subprocess.run(command, check=False, env=environment).returncode:
        raise SystemExit(f"the coordinator failed; the agents' logs are in {FOLDER}")


def _show(settings: RunSettings, devices: list[DeviceSpec]) -> None:
    method = settings.method["name"]
    summary, rivals = read_summary(FOLDER / method), {name: read_summary(FOLDER / name) for name in RIVALS}
    store = RunStore.read(FOLDER / method / "state.sqlite")
    boards = {device.name: device.board.name for device in devices}
    files = write_report(FOLDER, settings, summary, store.records(), rivals=rivals, boards=boards)
    store.close()
    console.rule("[bold]what each device gained")
    console.print(device_table(summary, rivals, boards=boards))
    console.print(run_table(summary, rivals))
    ours, theirs = summary.bytes, rivals["fedavg"].bytes
    console.print(
        f"{method} sent {ours.up:,} bytes up where FedAvg sent {theirs.up:,} and dense float32 "
        f"takes {theirs.up_dense:,}: {ours.up / theirs.up_dense:.0%} of dense."
    )
    for file in files:
        if file.suffix in (".html", ".png"):
            console.print(f"  {file}")


if __name__ == "__main__":
    try:
        main()
    except FleetuneError as problem:
        raise SystemExit(f"demo: {problem}") from None
