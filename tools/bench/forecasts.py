"""How well agents foretell their rounds: real processes over MQTT behind emulated links.

    python -m fleetune.tools.bench.forecasts --rounds 14

For each link a broker, a coordinator and agents run in network namespaces
(`tools.links.network_namespaces`), and the agents choose their ratios. The table holds what they expected of
each round against what it took, from the runs' summary.json; the first five rounds of each agent, in which it
learns, apart. Needs root.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from fleetune.coordinator.broker.credentials import credentials_of
from fleetune.coordinator.metrics.registry import shown_at
from fleetune.coordinator.metrics.summary import Summary, read_summary
from fleetune.protocols.errors import SettingError
from fleetune.protocols.one_line import one_line_errors
from fleetune.protocols.settings.run_toml import read_run
from fleetune.protocols.wire.topics import JOIN_USER
from fleetune.tools.links.link import Constant
from fleetune.tools.links.network_namespaces import HUB_ADDRESS, Network
from fleetune.tools.simulator.split import write_shares

LINKS = ((2.0, 10.0), (11.33, 52.87), (0.5, 5.0))  # Mbit/s up and down
DELAY_S = 0.02
PATIENCE_S = 1200

RUN_TOML = """
[run]
name = "{name}"
rounds = {rounds}
[model]
name = "{model}"
input_shape = [1, 8, 8]
num_classes = 10
[method]
name = "{method}"
[data]
source = "digits"
partition = {{ kind = "iid", samples = 400 }}
[training]
epochs = 2
batch_size = 16
[round]
start_with = {agents}
deadline_s = {deadline_s}
[fleet]
devices = {agents}
"""


def measure(uplink_mbps: float, downlink_mbps: float, folder: Path, settings: dict[str, Any]) -> Summary:
    """The summary of a run of real agents behind such a link.

    Raises:
        SettingError: no namespaces here, or the coordinator failed.
    """
    folder.mkdir()
    name = f"up-{uplink_mbps:g}-down-{downlink_mbps:g}".replace(".", "_")
    run_file = folder / "run.toml"
    run_file.write_text(RUN_TOML.format(name=name, **settings))
    shares = list(write_shares(read_run(run_file), folder / "data"))
    link = Constant(uplink_mbps * 1e6, downlink_mbps * 1e6, DELAY_S)
    with Network([link] * len(shares)) as network, ExitStack() as stack:
        serve = [
            "fleetune.coordinator.cli",
            "serve",
            str(run_file),
            "--bind",
            HUB_ADDRESS,
            "--runs",
            str(folder),
        ]
        coordinator = _start(network, network.hub, serve, folder / "coordinator.log", stack)
        password = credentials_of(name, folder).join
        broker = {"FLEETUNE_BROKER": f"mqtt://{JOIN_USER}:{password}@{HUB_ADDRESS}:1883"}
        for share, namespace in zip(shares, network.agents, strict=True):
            command = ["fleetune.edge_agent.cli", "run", "--fleet", name, "--leave-after-run"]
            command += ["--device", share.stem, "--data", f"npz:{share}", "--state", str(folder / "state")]
            _start(network, namespace, command, folder / f"{share.stem}.log", stack, broker)
        if coordinator.wait(PATIENCE_S) != 0:
            raise SettingError(f"the coordinator failed: {(folder / 'coordinator.log').read_text()[-500:]}")
    return read_summary(folder / name)


def _start(
    network: Network,
    namespace: str,
    module: list[str],
    log: Path,
    stack: ExitStack,
    variables: Mapping[str, str] | None = None,
) -> "subprocess.Popen[bytes]":
    command = network.command(namespace, sys.executable, "-P", "-m", *module)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, **(variables or {})}
        )
    stack.callback(_end, process)
    return process


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    process.wait(30)


def _table(found: Mapping[str, Summary]) -> Table:
    table = Table(title="error of what agents expected, after five rounds: median / worst decile (pairs)")
    table.add_column("quantity")
    for link in found:
        table.add_column(link, justify="right")
    for metric in shown_at("predictions"):
        table.add_row(metric.name, *_row(metric.name, found))
    table.add_row("ratios taken", *(_ratios(summary) for summary in found.values()))
    return table


def _row(quantity: str, found: Mapping[str, Summary]) -> Iterator[str]:
    for summary in found.values():
        found_errors = (summary.predicted_vs_actual or {}).get(quantity)
        errors = found_errors.after_five_rounds if found_errors else None
        if errors is None:
            yield "unknown"
        else:
            yield f"{errors.median:.1%} / {errors.worst_decile:.1%} ({errors.pairs})"


def _ratios(summary: Summary) -> str:
    taken = sorted({ratio for ratios in summary.ratios.values() for ratio in ratios})
    return ", ".join(f"{ratio:g}" for ratio in taken)


def main(
    rounds: Annotated[int, typer.Option(help="of each run")] = 14,
    agents: Annotated[int, typer.Option(help="real agents in each run")] = 2,
    method: str = "fedspu",
    model: str = "cnn-kapc",
    deadline_s: Annotated[float, typer.Option(help="of a round")] = 30.0,
    out: Annotated[Path | None, typer.Option(help="JSON file for the summaries")] = None,
) -> None:
    """Run real agents behind three emulated links and hold their predictions against what happened."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    settings = {
        "rounds": rounds,
        "agents": agents,
        "method": method,
        "model": model,
        "deadline_s": deadline_s,
    }
    found = {}
    with one_line_errors("bench_budget"), tempfile.TemporaryDirectory() as folder:
        for up, down in LINKS:
            link = f"{up:g}/{down:g} Mbit/s"
            found[link] = measure(up, down, Path(folder) / f"{up:g}", settings)
            print(f"{link}: {found[link].rounds} rounds", file=sys.stderr)
    Console().print(_table(found))
    if out is not None:
        out.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))


if __name__ == "__main__":
    typer.run(main)
