"""Checks that a network has its specified links, by a real transfer in each direction over every link."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fleetune.tools.links import helper_process
from fleetune.tools.links.link import Constant, Direction, Link, Trace
from fleetune.tools.links.measure_link import Flow, Measured
from fleetune.tools.links.network_namespaces import HUB_ADDRESS, REPLAY, Network, Plan, plan_of

RATE_ERROR = 0.05
LOSSY_SHARE = 0.3  # minimum share of the expected rate: the rate of one connection with loss varies widely
ROUND_TRIP_ERROR, ROUND_TRIP_ERROR_S = 0.1, 3e-3
MANY_BITS, LONGEST_S = 1e6, 20.0  # minimum bits of a transfer: a slow link is measured for longer
SECOND_LOOK = 3  # a link that deviates is measured again for so many times as long


@dataclass(frozen=True)
class Verdict:
    """Expected and measured values of one agent's link.

    Attributes:
        expected_bps: rates up and down at the time of the transfer.
        measured: measured values; None if the agent could not reach the hub.
        problems: a line for each deviation.
    """

    index: int
    link: Constant | Trace
    expected_bps: tuple[float, float] | None
    measured: Measured | None
    problems: tuple[str, ...]


def verify(name: str, seconds: float) -> Iterator[Verdict]:
    """Measure a network's links one after the other, each direction for `seconds`; slow links take longer.

    Raises:
        SettingError: there is no such network, or `up` did not finish.
    """
    plan = plan_of(name)
    network = Network(plan.links, name)
    serving = network.command(
        network.hub, sys.executable, "-P", "-m", "fleetune.tools.links.measure_link", "serve", HUB_ADDRESS
    )
    with subprocess.Popen(serving, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdin is not None
        port = server.stdout.readline().strip()
        try:
            for index in range(len(plan.links)):
                dead = _dead(network, index)
                verdict = judge(plan, index, _measure(network, index, port, seconds))
                # the machine may have been busy: measure again
                if verdict.measured and verdict.problems and not dead:
                    verdict = judge(plan, index, _measure(network, index, port, SECOND_LOOK * seconds))
                yield replace(verdict, problems=(*dead, *verdict.problems))
        finally:
            server.stdin.close()


def _measure(network: Network, index: int, port: str, seconds: float) -> Measured | None:
    link = network.links[index]
    slowest_bps = min(link.uplink_bps, link.downlink_bps) if isinstance(link, Constant) else MANY_BITS
    seconds = max(seconds, min(MANY_BITS / slowest_bps, LONGEST_S))
    asking = [
        sys.executable,
        "-P",
        "-m",
        "fleetune.tools.links.measure_link",
        "ask",
        HUB_ADDRESS,
        port,
        str(seconds),
    ]
    done = subprocess.run(
        network.command(network.agents[index], *asking), capture_output=True, text=True, check=False
    )
    if done.returncode:
        return None
    found = json.loads(done.stdout)
    return Measured(**found | {direction: Flow(**found[direction]) for direction in ("up", "down")})


def _dead(network: Network, index: int) -> tuple[str, ...]:
    """Return a line if the link has a trace that was replayed, and the process that replayed it has died."""
    file = network.folder / REPLAY
    if not isinstance(network.links[index], Trace) or not file.exists() or helper_process.is_held(file):
        return ()
    return ("the process that replays its trace is gone",)


def judge(plan: Plan, index: int, measured: Measured | None) -> Verdict:
    """Compare an agent's measured link with its specified link during the measurement."""
    link = plan.links[index]
    if measured is None:
        return Verdict(index, link, None, None, ("the agent cannot reach the hub",))
    expected = _expected(plan, link, measured, "up"), _expected(plan, link, measured, "down")
    problems = *_rate_problems(link, expected, measured), *_round_trip_problems(link, measured)
    return Verdict(index, link, expected, measured, problems)


def _expected(plan: Plan, link: Link, measured: Measured, direction: Direction) -> float:
    flow: Flow = getattr(measured, direction)
    start_s, end_s = flow.started_s - plan.started_s, flow.ended_s - plan.started_s
    return link.bits(start_s, end_s, direction) / max(end_s - start_s, 1e-9)


def _rate_problems(
    link: Constant | Trace, expected: tuple[float, float], measured: Measured
) -> Iterator[str]:
    steady = isinstance(link, Constant) and not link.loss
    for word, rate, flow in zip(("up", "down"), expected, (measured.up, measured.down), strict=True):
        most = rate if steady else _fastest(link, word == "up")
        least = rate * (1 - RATE_ERROR) if steady else rate * LOSSY_SHARE
        if not least <= flow.bps <= most * (1 + RATE_ERROR):
            yield f"{word} {flow.bps / 1e6:.3g} instead of {rate / 1e6:.3g} Mbit/s"


def _fastest(link: Constant | Trace, up: bool) -> float:
    rates = link.uplink_bps if up else link.downlink_bps
    return max(rates) if isinstance(rates, tuple) else rates


def _round_trip_problems(link: Link, measured: Measured) -> Iterator[str]:
    expected_s = 2 * link.delay_s
    if measured.round_trip_s is None:
        yield "no datagram came back"
    elif abs(measured.round_trip_s - expected_s) > ROUND_TRIP_ERROR * expected_s + ROUND_TRIP_ERROR_S:
        yield f"round trip {measured.round_trip_s * 1e3:.1f} instead of {expected_s * 1e3:.1f} ms"
