"""Texts and tables that `edge-sim link` prints about links and networks."""

import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fleetune.tools.links.link import Constant, Direction, Trace, tcp_bps
from fleetune.tools.links.network_namespaces import HUB_ADDRESS, Network, Plan
from fleetune.tools.links.presets import PRESETS, Figure
from fleetune.tools.links.shaping import SMALLEST_DELAY_S
from fleetune.tools.links.verify import Verdict

MADE_OF = {
    "plain": "veth and TBF",
    "netem": "veth, TBF and netem",
    "relay": "TUN devices, TBF and a relay process each, because the kernel has no netem",
}
DIRECTIONS: tuple[Direction, Direction] = "up", "down"
SHOWN = 10  # devices for which a command line is shown
console = Console(width=None if sys.stdout.isatty() else 100)


def words(link: Constant | Trace) -> str:
    """Return a short description of a link."""
    if isinstance(link, Constant):
        up, down, kind = link.uplink_bps, link.downlink_bps, ""
    else:
        up, down = (link.bits(0, link.period_s, direction) / link.period_s for direction in DIRECTIONS)
        kind = f" on average over {link.period_s / 60:.4g} min"
    rates = f"{up / 1e6:.4g} up, {down / 1e6:.4g} down Mbit/s{kind}"
    return f"{rates}, {link.delay_s * 1e3:.4g} ms, {link.loss * 100:.4g} % lost"


def description(plan: Plan) -> str:
    """Return a description of a network: one line for each kind of link."""
    kinds = Counter(zip(map(words, plan.links), plan.kinds, strict=True))
    return "\n".join(f"{count} x {link} ({MADE_OF[kind]})" for (link, kind), count in kinds.items())


def warnings(plan: Plan) -> Iterator[str]:
    """Yield warnings about unexpected properties of these links."""
    for link in dict.fromkeys(link for link in plan.links if isinstance(link, Constant)):
        most = tcp_bps(max(link.uplink_bps, link.downlink_bps), link.delay_s, link.loss)
        if most < max(link.uplink_bps, link.downlink_bps):
            yield (
                f"one TCP connection gets about {most / 1e6:.2g} Mbit/s over such a link: it loses "
                f"{link.loss * 100:.4g} % at a round trip of {link.delay_s * 2e3:.4g} ms"
            )
        if 0 < link.delay_s < SMALLEST_DELAY_S and not link.loss:
            yield (
                f"a delay of {link.delay_s * 1e3:.3g} ms is not emulated, because the kernel itself delays"
                " packets that long"
            )


def commands(network: Network, devices: list[str]) -> str:
    """Return command lines that start a coordinator and agents in a network."""
    here = Path(sys.executable).parent
    everywhere = "0.0.0.0"  # noqa: S104 - in a namespace that only the agents share
    program = str(here / "edge-coordinator")
    serve = network.command(network.hub, program, "serve", "RUN_FILE", "--bind", everywhere)
    lines = ["coordinator:", f"  {shlex.join(serve)}"]
    for device, namespace in list(zip(devices, network.agents, strict=True))[:SHOWN]:
        options = f"--fleet FLEET --device {device} --broker {HUB_ADDRESS} --data DATA".split()
        agent = network.command(namespace, str(here / "edge-agent"), "run", *options)
        lines += [f"{device}:", f"  {shlex.join(agent)}"]
    if len(devices) > SHOWN:
        lines.append(f"... and so on to {network.agents[-1]}")
    name = "" if network.name == "fleetune" else f" --name {network.name}"
    return "\n".join([*lines, f"then: edge-sim link status{name}, and in the end: edge-sim link down{name}"])


def verdict_table(verdicts: list[Verdict]) -> Table:
    """Return a table of specified and measured values, one row for each agent."""
    table = Table("link", "carried, Mbit/s", "of expected", "round trip", "lost", "verdict")
    for verdict in verdicts:
        found, expected = verdict.measured, verdict.expected_bps
        if found is None or expected is None:
            table.add_row(str(verdict.index), "", "", "", "", ", ".join(verdict.problems))
            continue
        flows = found.up, found.down
        table.add_row(
            f"{verdict.index}: {words(verdict.link)}",
            " / ".join(f"{flow.bps / 1e6:.4g}" for flow in flows),
            " / ".join(_share(flow.bps, rate) for flow, rate in zip(flows, expected, strict=True)),
            f"{found.round_trip_s * 1e3:.1f} ms" if found.round_trip_s is not None else "none",
            f"{found.lost} of {found.pings}",
            ", ".join(verdict.problems) or "ok",
        )
    return table


def _share(bps: float, expected_bps: float) -> str:
    return f"{bps / expected_bps:.1%}" if expected_bps else "outage"


def print_presets() -> None:
    """Print all presets with their figures and sources."""
    columns = ["preset", "up", "down", "delay", "loss", "spread", "outages", "what it is"]
    table = Table(*columns, caption="* an estimate. Mbit/s, ms one way, % of packets, % of the mean, a day")
    sources = []
    for name, one in PRESETS.items():
        outages = f"{_value(one.outages_per_day)} of {_value(one.outage_s)} s"
        table.add_row(
            name,
            _value(one.uplink_mbps),
            _value(one.downlink_mbps),
            _value(one.delay_ms),
            _value(one.loss_percent),
            _value(one.spread, 100),
            outages if one.outages_per_day.value else "none",
            one.title,
        )
        sourced: dict[str, list[str]] = {}
        for figure_name, figure in one.figures():
            if figure.source.startswith("http"):
                sourced.setdefault(figure.source, []).append(figure_name)
        sources += [f"{name} {', '.join(figures)}: {source}" for source, figures in sourced.items()]
    console.print(table)
    for line in sources:
        console.print(line, soft_wrap=True, highlight=False)


def _value(figure: Figure, scale: float = 1) -> str:
    return f"{figure.value * scale:g}" + ("*" if figure.source == "estimate" else "")
