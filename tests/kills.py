"""Processes of a fleet killed (kill -9) at random moments, restarted at once: the run ends as without.

    python -m tests.kills --count 500 --seed 0

Each kill strikes the coordinator, an agent or the embedded broker, whatever that is at: starting, joining,
training, sending, writing, aggregating. The coordinator restarts the broker; what else is killed is restarted
here. Rounds wait for all devices and there is no final evaluation: a round that begins while a device is away
goes on without it, by design. It prints a line a run and ends with 1 when one came to something else.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
from tests.helpers.fleet_processes import Fleet, run_toml

TOML = run_toml(rounds=8, epochs=20, quorum=3).replace("[run]", "[run]\nfinal_evaluation = false")
MEAN_S = 1.0  # between kills
BROKER, COORDINATOR = "broker", "coordinator"


def undisturbed(folder):
    """What the run comes to without kills."""
    with Fleet(folder, TOML, embedded=True) as fleet:
        fleet.start(trainer="onnx", options=())
        assert fleet.coordinator.wait() == 0
        return fleet.outcome()


def struck(folder, seed, most, mean_s=MEAN_S, victims=None):
    """What it comes to with up to `most` kills, and how often each victim was killed."""
    rng, counts = np.random.default_rng(seed), Counter()
    with Fleet(folder, TOML, embedded=True) as fleet:
        victims = victims or [BROKER, COORDINATOR, *fleet.shares]
        fleet.start(trainer="onnx", options=())
        while not ended(fleet, rng.exponential(mean_s) if counts.total() < most else None):
            victim = rng.choice(victims)
            counts[str(victim)] += strike(fleet, victim)
        return fleet.outcome(), counts


def strike(fleet, victim):
    """Kill a victim, the broker as soon as it runs, and see that it is restarted; whether it was killed."""
    if victim == BROKER:
        # One that dies before the coordinator says where it is is a start that fails: an error, in one line.
        while fleet.coordinator.running:
            if fleet.coordinator.lines("^broker: embedded") and fleet.kill_embedded_broker():
                return True
            time.sleep(0.05)
        return False
    if victim == COORDINATOR:
        fleet.coordinator.kill()
        fleet.start_coordinator()
    else:
        fleet.agents[victim].kill()
        fleet.start_agent(victim, trainer="onnx", options=())
    return True


def ended(fleet, within_s):
    """Whether the run is over; None: wait until it is."""
    try:
        code = fleet.coordinator.wait() if within_s is None else fleet.coordinator._process.wait(within_s)
    except subprocess.TimeoutExpired:
        if within_s is None:
            raise
        return False
    # killed between its last write and its end, it is started again on a finished run
    assert code == 0 or fleet.coordinator.lines("finished run"), fleet.coordinator.text()
    return True


def play(folder, count, seed, each=25):
    """Kill `count` times in as many runs as that takes; yield a line for each difference, and one a run."""
    done, runs, failed, totals = 0, 0, 0, Counter()
    wanted = undisturbed(_made(folder / "undisturbed"))
    while done < count:
        counts = Counter()
        try:
            found, counts = struck(_made(folder / str(seed + runs)), seed + runs, min(each, count - done))
            differs = list(_differences(found, wanted))
        except AssertionError as problem:
            differs = [f"it did not end: {problem}"]
        totals += counts
        done, failed = done + max(1, counts.total()), failed + bool(differs)
        for line in differs:
            yield f"seed {seed + runs}, {counts.total()} kills: {line[:600]}"
        runs += 1
        by_victim = ", ".join(f"{name} {number}" for name, number in sorted(totals.items()))
        yield f"{done} kills in {runs} runs, {failed} of them not equal ({by_victim})"


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--count", type=int, default=500)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--each", type=int, default=25, help="at most so many a run")
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for line in play(Path(folder), asked.count, asked.seed, asked.each):
            print(line, flush=True)
    return 0 if ", 0 of them not equal" in line else 1


def _differences(found, wanted):
    for name in vars(wanted):
        this, that = getattr(found, name), getattr(wanted, name)
        if this != that and name in ("shared", "tensors"):
            yield f"another {name}"
        elif isinstance(this, dict):
            yield from (f"another {name} of {key}" for key in that if this.get(key) != that[key])
        else:
            yield from (
                f"{this} is not {that}" for this, that in zip(this, that, strict=False) if this != that
            )


def _made(folder):
    folder.mkdir()
    return folder


if __name__ == "__main__":
    sys.exit(main())
