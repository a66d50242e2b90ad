"""edge-sim link: run real processes behind emulated links, and list the presets of links."""

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleetune.protocols.errors import SettingError
from fleetune.protocols.one_line import one_line_errors

if TYPE_CHECKING:
    from fleetune.tools.links.link import Constant, Trace

app = typer.Typer(
    help="Put real processes behind slow, lossy or failing links (Linux, root), one network namespace each.",
    no_args_is_help=True,
)

Up = Annotated[float | None, typer.Option("--up", help="rate from an agent, Mbit/s of TCP payload")]
Down = Annotated[float | None, typer.Option("--down", help="rate to an agent, Mbit/s of TCP payload")]
Delay = Annotated[float, typer.Option(help="delay one way, ms; a ping takes twice as long")]
Loss = Annotated[float, typer.Option(help="percentage of packets lost in each direction")]
PresetName = Annotated[
    str | None, typer.Option("--preset", help="name of a preset link, see `edge-sim link presets`")
]
TraceFile = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        help="CSV file time_s,uplink_bps,downlink_bps, which is repeated; a rate of 0 is an outage",
    ),
]
RunFile = Annotated[
    Path | None, typer.Option("--run", help="run.toml file; each device of its fleet gets a link")
]
Agents = Annotated[int, typer.Option(min=1, help="number of links")]
Seed = Annotated[int, typer.Option(help="seed of a preset's random values")]
Name = Annotated[
    str, typer.Option(help="name of the network; the namespaces are NAME-hub, NAME-0, NAME-1, ...")
]
NAME = "fleetune"


@app.command("up")
def up(
    uplink: Up = None,
    downlink: Down = None,
    delay: Delay = 0.0,
    loss: Loss = 0.0,
    agents: Agents = 1,
    preset: PresetName = None,
    trace: TraceFile = None,
    run: RunFile = None,
    seed: Seed = 0,
    name: Name = NAME,
) -> None:
    """Make a network: a hub for the coordinator, and a namespace for each agent behind its link.

    The rates come from --up and --down, or from --preset, --trace or --run. The host's own network is left
    alone. `edge-sim link down` removes everything, also after a crash.
    """
    from fleetune.tools.links.network_namespaces import Network, obstacle
    from fleetune.tools.links.show import commands, description, warnings

    with one_line_errors("edge-sim"):
        if problem := obstacle():
            instead = "`edge-sim link proxy --broker HOST:PORT ...`, an approximate TCP proxy for each agent"
            raise SettingError(f"link up {problem}; without it: {instead}")
        links = _links(uplink, downlink, delay, loss, agents, preset, trace, run, seed)
        network = Network(list(links.values()), name)
        plan = network.up()
    print(description(plan))
    for line in warnings(plan):
        print(line, file=sys.stderr)
    print(commands(network, list(links)))


@app.command("status")
def status(
    name: Name = NAME,
    seconds: Annotated[
        float, typer.Option(min=0.5, help="seconds of transfer in each direction of each link")
    ] = 3.0,
) -> None:
    """Measure every link with a real transfer; exit code 1 if one is not as it should be."""
    from fleetune.tools.links.network_namespaces import obstacle
    from fleetune.tools.links.show import console, verdict_table
    from fleetune.tools.links.verify import verify

    with one_line_errors("edge-sim"):
        if problem := obstacle():
            raise SettingError(f"link status {problem}")
        verdicts = []
        for verdict in verify(name, seconds):
            verdicts.append(verdict)
            console.print(f"link {verdict.index}: {', '.join(verdict.problems) or 'as it should be'}")
    console.print(verdict_table(verdicts))
    if any(verdict.problems for verdict in verdicts):
        raise typer.Exit(1)


@app.command("down")
def down(
    name: Name = NAME,
    everything: Annotated[
        bool, typer.Option("--all", help="remove all networks, whatever their names")
    ] = False,
) -> None:
    """Remove a network: its links, namespaces and helper processes; whole, half made, or left by a crash."""
    from fleetune.tools.links import network_namespaces

    with one_line_errors("edge-sim"):
        if problem := network_namespaces.obstacle():
            raise SettingError(f"link down {problem}")
        names = network_namespaces.networks() if everything else [network_namespaces.check_name(name)]
        for one in names:
            found = one in network_namespaces.networks()
            left = network_namespaces.down(one)
            print(f"{one}: removed" if found else f"{one}: nothing is up")
            for namespace, pids in left.items():
                words = " ".join(map(str, pids))
                print(f"still running in {namespace}, now without a network: kill {words}", file=sys.stderr)


@app.command("presets")
def presets() -> None:
    """List the presets of links, each figure with its source."""
    from fleetune.tools.links.show import print_presets

    print_presets()


@app.command("proxy")
def proxy(
    broker: Annotated[str, typer.Option(help="host:port of the real broker")],
    uplink: Up = None,
    downlink: Down = None,
    delay: Delay = 0.0,
    loss: Loss = 0.0,
    agents: Agents = 1,
    preset: PresetName = None,
    trace: TraceFile = None,
    run: RunFile = None,
    seed: Seed = 0,
) -> None:
    """Without root: a slow TCP proxy on this machine for each agent, until Ctrl-C. Approximate.

    It paces bytes instead of packets: loss only lowers the rate, an outage holds data back instead of losing
    it, and time on a busy machine is good to some milliseconds.
    """
    from fleetune.protocols.wire.transport.mqtt import parse_broker
    from fleetune.tools.links.proxy import run_proxies

    with one_line_errors("edge-sim"):
        links = _links(uplink, downlink, delay, loss, agents, preset, trace, run, seed)
        where = parse_broker(broker)

        def show(ports: list[int]) -> None:
            for agent, port in zip(links, ports, strict=True):
                print(f"{agent}: edge-agent run --broker 127.0.0.1:{port} ...", flush=True)

        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(run_proxies(list(links.values()), (where.host, where.port), show))


def _links(
    uplink: float | None,
    downlink: float | None,
    delay_ms: float,
    loss_percent: float,
    agents: int,
    preset: str | None,
    trace: Path | None,
    run: Path | None,
    seed: int,
) -> "dict[str, Constant | Trace]":
    """One link for each agent's name. Raises SettingError."""
    from fleetune.protocols.randomness import Key
    from fleetune.tools.links.fleet_links import links_named
    from fleetune.tools.links.link import Constant

    rates = uplink is not None or downlink is not None
    if rates + (preset is not None) + (trace is not None) + (run is not None) != 1:
        raise SettingError("say what the links carry: --up and --down, or one of --preset, --trace, --run")
    if run is not None:
        return _links_of_run(run)
    if preset is not None and (delay_ms or loss_percent):
        raise SettingError("--delay and --loss go with --up and --down or with --trace; a preset has its own")
    names = [f"agent-{index}" for index in range(agents)]
    delay_s, loss = delay_ms / 1e3, loss_percent / 100
    if rates:
        if uplink is None or downlink is None:
            raise SettingError("give both --up and --down")
        return dict.fromkeys(names, Constant(uplink * 1e6, downlink * 1e6, delay_s, loss))
    keys = [Key.of("link", seed, index) for index in range(agents)]
    drawn = links_named(str(trace or preset), keys, delay_s=delay_s, loss=loss)
    return dict(zip(names, drawn, strict=True))


def _links_of_run(run_file: Path) -> "dict[str, Constant | Trace]":
    """Map each agent's name to its link. Raises SettingError."""
    from fleetune.protocols.settings.run_toml import read_run
    from fleetune.tools.links.link import Constant, Trace
    from fleetune.tools.simulator.device_specs import device_specs, with_group_devices

    links = {}
    settings = with_group_devices(read_run(run_file))
    for device in device_specs(settings.fleet, settings.run.seed):
        assert isinstance(device.link, Constant | Trace)
        links[device.name] = device.link
    return links
