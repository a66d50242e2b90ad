"""Replays traces: changes the rates of emulated links over time.

    python -m fleetune.tools.links.trace_replay NAME

replays the traces of the running network NAME in the background (`tools.links.helper_process`).
"""

import heapq
import sys
import time
from collections.abc import Iterator

from fleetune.protocols.errors import SettingError
from fleetune.tools.links import helper_process
from fleetune.tools.links.link import Trace
from fleetune.tools.links.network_namespaces import REPLAY, Plan, folder_of, plan_of, set_rates


def changes(trace: Trace, index: int) -> Iterator[tuple[float, int, tuple[float, float]]]:
    """Yield an agent's rate changes without end: (seconds after the start, index of the agent, new rates)."""
    begins_s = 0.0
    while True:
        for time_s, up, down in zip(trace.times_s, trace.uplink_bps, trace.downlink_bps, strict=True):
            yield begins_s + time_s, index, (up, down)
        begins_s += trace.period_s


def replay(name: str, plan: Plan, network: int) -> None:
    """Set the links' rates as their traces prescribe, until the network is taken down.

    `network` is the file descriptor that `helper_process.detach` returned.
    """
    traces = ((index, link) for index, link in enumerate(plan.links) if isinstance(link, Trace))
    for at_s, index, rates_bps in heapq.merge(*(changes(trace, index) for index, trace in traces)):
        while (is_wanted := helper_process.is_wanted(network)) and (
            wait_s := plan.started_s + at_s - time.monotonic()
        ) > 0:
            time.sleep(min(wait_s, helper_process.WATCH_S))
        if not is_wanted:
            return
        set_rates(name, index, plan.links[index], plan.kinds[index], rates_bps)


def main() -> None:
    name = sys.argv[1]
    try:
        plan = plan_of(name)
        helper_process.hold(folder_of(name) / REPLAY)  # so that `verify` notices when this process has died
        network = helper_process.detach(folder_of(name) / helper_process.ALIVE)
        replay(name, plan, network)
    except (SettingError, OSError) as problem:
        sys.exit(str(problem))  # a detached process has no reader for errors; the network was taken down


if __name__ == "__main__":
    main()
