"""Processes of a fleet killed (kill -9) at random moments, restarted at once: the run ends as without.

    python -m tests.kills --count 500 --seed 0

Each kill strikes the coordinator or an agent, whatever that is at: starting, joining, training, sending,
writing, aggregating. Rounds wait for everybody and nobody rehearses: a round that begins while a device is
away does without it, by design. It prints a line a run and ends with 1 when one came to something else.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from tests.helpers.fleet_processes import Fleet, run_toml

TOML = run_toml(rounds=8, epochs=20, quorum=3).replace("[run]", "[run]\nfinal_evaluation = false")
MEAN_S = 1.0  # between kills


def undisturbed(folder):
    """What the run comes to when nobody strikes."""
    with Fleet(folder, TOML) as fleet:
        fleet.start(trainer="onnx", options=())
        assert fleet.coordinator.wait() == 0
        return fleet.outcome()


def struck(folder, seed, most, mean_s=MEAN_S):
    """What it comes to with up to `most` kills, and how many there were."""
    rng, count = np.random.default_rng(seed), 0
    with Fleet(folder, TOML) as fleet:
        fleet.start(trainer="onnx", options=())
        while not ended(fleet, rng.exponential(mean_s) if count < most else None):
            victim = rng.choice(["coordinator", *fleet.shares])
            count += 1
            if victim == "coordinator":
                fleet.coordinator.kill()
                fleet.start_coordinator()
            else:
                fleet.agents[victim].kill()
                fleet.start_agent(victim, trainer="onnx", options=())
        return fleet.outcome(), count


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


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--count", type=int, default=500)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--each", type=int, default=25, help="at most so many a run")
    asked = options.parse_args()
    done, runs, failed, count = 0, 0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        wanted = undisturbed(_made(Path(folder) / "undisturbed"))
        while done < asked.count:
            seed, runs = asked.seed + runs, runs + 1
            try:
                most = min(asked.each, asked.count - done)
                found, count = struck(_made(Path(folder) / str(seed)), seed, most)
                differs = list(_differences(found, wanted))
            except AssertionError as problem:
                differs = [f"it did not end: {problem}"]
            done, failed = done + count, failed + bool(differs)
            for line in differs:
                print(f"seed {seed}, {count} kills: {line[:600]}", flush=True)
            print(f"{done} kills in {runs} runs, {failed} of them not equal", flush=True)
    return 1 if failed else 0


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
