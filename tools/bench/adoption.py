"""What the gate of [adoption] is worth: methods with it, without it, and each device alone.

    python -m fleetune.tools.bench.adoption RUN.toml --methods fedavg,fedspu --seeds 0,1 [--unlike 3]

Every method is simulated twice, gated and as its paper has it (nothing held out); local-only once. Compared
is what the devices serve in the end, on their own test samples, which are the same in all three. A device is
below alone when it is right less often than local-only's model by more than the noise of its own test
samples: 1.645 standard errors of the paired difference, one-sided 95 %. By chance alone that happens to one
device in twenty. With --unlike 3 the devices 0, 3, 6, ... are also counted apart, in brackets.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from msgspec import UNSET
from msgspec.structs import replace

from fleetune.edge_agent.personal.served_model import read_served
from fleetune.edge_agent.training.local_training import LocalTrainer
from fleetune.edge_agent.training.trainers import make_backend
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.settings.adoption import AdoptionSection
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.run_toml import read_run
from fleetune.tools.simulator import runner, starting_models
from fleetune.tools.simulator.simulated_fleet import Shares, simulated_devices

LOCAL = "local-only"
NOISE = 1.645  # standard errors: one-sided 95 %


@dataclass(frozen=True)
class Served:
    """What the devices serve after a run.

    Attributes:
        weights: of each device, shape (spec.size,).
        trainers: of each device, to judge them.
        adopted: devices that serve a model of the fleet; None: the run does not tell.
    """

    weights: list[FlatArray]
    trainers: list[LocalTrainer]
    adopted: int | None

    @property
    def score(self) -> float:
        """Mean over devices, on their own test samples."""
        pairs = zip(self.trainers, self.weights, strict=True)
        scores = [trainer.score(weights, "test") for trainer, weights in pairs]
        return float(np.mean([score for score in scores if score is not None]))

    def below(self, alone: "Served") -> list[bool]:
        """Of each device, whether it is below alone by more than the noise of its test samples."""
        models = zip(self.trainers, self.weights, alone.weights, strict=True)
        gains = [trainer.gain(ours, theirs, "test") for trainer, ours, theirs in models]
        return [one is not None and one.mean < -NOISE * one.standard_error for one in gains]


def played(settings: RunSettings, method: dict[str, Any], folder: Path) -> Served:
    """Simulate a run, and fetch the models that its devices serve."""
    settings = replace(settings, method=method)
    run, summary = runner.simulate(settings, folder, workers=0, fresh=True)
    run.store.close()
    spec, shares = run.enrolment.spec, Shares(settings)
    backend = make_backend("torch", spec, None, 1, task=run.enrolment.learns)
    weights, trainers = [], []
    for device in simulated_devices(settings):
        found = read_served(starting_models.served(folder / "devices", device.name).read(), spec)
        assert found is not None, "every device has worked"
        weights.append(found.weights)
        trainers.append(LocalTrainer(backend, shares.of(device.index, spec), settings.training))
    return Served(weights, trainers, None if summary.adoption is UNSET else summary.adoption.adopted)


def rows(settings: RunSettings, methods: list[str], every: int) -> Iterator[str]:
    """The table's lines, one a method."""
    gated = replace(settings, adoption=replace(settings.adoption, enabled=True))
    plain = replace(settings, adoption=AdoptionSection())
    with TemporaryDirectory() as folder:
        where = Path(folder) / "run"
        alone = played(plain, {"name": LOCAL}, where)
        for name in methods:
            section = {"name": name, **settings.compare.get(name, {})}
            ungated, with_gate = played(plain, section, where), played(gated, section, where)
            cells = [
                name,
                _percent(alone.score),
                _percent(ungated.score),
                _count(ungated.below(alone), every),
                _percent(with_gate.score),
                _count(with_gate.below(alone), every),
                f"{with_gate.adopted} of {len(alone.weights)}",
            ]
            yield f"| {' | '.join(cells)} |"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}"


def _count(below: list[bool], every: int) -> str:
    """How many; with the devices that are unlike the others in brackets."""
    unlike = f" ({sum(below[::every])})" if every else ""
    return f"{sum(below)}{unlike}"


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("run", type=Path)
    options.add_argument("--methods", default="fedavg,fedspu,kapc,fedpurin,srp-pfed,dc-pfl")
    options.add_argument("--seeds", default="0")
    options.add_argument("--unlike", type=int, default=0, help="every so many devices one is unlike")
    asked = options.parse_args()
    settings = read_run(asked.run)
    print("| seed | method | alone | ungated | below alone | gated | below alone | adopted |", flush=True)
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for seed in map(int, asked.seeds.split(",")):
        seeded = replace(settings, run=replace(settings.run, seed=seed))
        for line in rows(seeded, asked.methods.split(","), asked.unlike):
            print(f"| {seed} {line}", flush=True)


if __name__ == "__main__":
    main()
