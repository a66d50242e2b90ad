"""Share of late rounds of a device that always takes the largest fitting ratio while its speed varies.

python -m tests.helpers.late_rounds    # the table of docs/ratios.md
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
from msgspec import structs
from tests.helpers.world import CAPABILITY, CHOICES, World

from fleetune.edge_agent.budget.owner_policy import Policy
from fleetune.edge_agent.budget.ratio_controller import RatioController
from fleetune.edge_agent.run.round_planner import RoundPlanner
from fleetune.firmware_profiles import load
from fleetune.protocols.conditions import Conditions
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.wire.messages import TransferKey

DEADLINE_S = 20.0  # half of the ratios are predicted to fit


def controller(late: float | None, deadline_s: float = DEADLINE_S, **policy: float) -> RatioController:
    """A device's controller for a run with this share of late rounds; None: a run without an objective."""
    report = DeviceReport("d", num_samples=CAPABILITY.num_samples)
    board = load("raspberry-pi-4b")
    known = RatioController(CHOICES, CAPABILITY, board, Policy(**policy), deadline_s, report)
    return structs.replace(known, proposed=late is not None, late=late).chosen(Conditions())


def play(
    known: RatioController, worlds: Iterable[World], deadline_s: float, seed: int = 0
) -> tuple[list[tuple[float, bool]], RatioController]:
    """Run one round in each world. A late round ends at its deadline, and its update is lost.

    Returns:
        The ratio of each round and whether it was late; and the device's controller at the end.
    """
    member, rng, now_s, rounds = RoundPlanner(known), np.random.default_rng(seed), 0.0, []
    for number, world in enumerate(worlds, 1):
        work = member.begin(TransferKey("task", "run", number, 1), 100, None, began_s=now_s)
        took = world.round(next(one for one in CHOICES if one.ratio == work.budget.ratio), rng)
        late = took.round_s > deadline_s
        rounds.append((work.budget.ratio, late))
        work = member.going_on(replace(work, taken=structs.replace(took, upload_s=None, joules=None)))
        if not late or known.late is None:
            member.learn(work.sent(took.upload_s, took.joules), Conditions())
        now_s += min(took.round_s, deadline_s)
    return rounds, member.ratio_controller


def fading(world: World, spread: float, lasts: float, rounds: int, seed: int) -> Iterator[World]:
    """The same world in every round, except its link: the rate is log-normal and correlated between rounds,
    as in `fleetune.tools.links.presets`.
    """
    rng, level = np.random.default_rng([seed, 1]), 0.0
    for _ in range(rounds):
        level = lasts * level + math.sqrt(1 - lasts**2) * rng.normal()
        factor = math.exp(spread * level)
        yield replace(world, uplink_bps=factor * world.uplink_bps, downlink_bps=factor * world.downlink_bps)


def main(rounds: int = 200, seeds: int = 8) -> None:
    """Print the table."""
    noisy = [(f"{100 * noise:g} %", World(noise=noise), 0.0, 0.0) for noise in (0.02, 0.1, 0.2, 0.3)]
    links = [(f"5 %, link 40 % lasting {lasts}", World(noise=0.05), 0.385, lasts) for lasts in (0.8, 0.97)]
    print("| noise | late before | mean p | late, 5 % | mean p |")
    for name, world, spread, lasts in [*noisy, *links]:
        cells = []
        for late in (None, 0.05):
            played = [
                one
                for seed in range(seeds)
                for one in play(
                    controller(late), fading(world, spread, lasts, rounds, seed), DEADLINE_S, seed
                )[0]
            ]
            ratios, lates = zip(*played, strict=True)
            cells += [f"{100 * np.mean(lates):.1f} %", f"{np.mean(ratios):.2f}"]
        print("|", " | ".join([name, *cells]), "|", flush=True)


if __name__ == "__main__":
    main()
