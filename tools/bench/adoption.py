"""What the gate of [adoption] is worth: methods with it, without it, and each device alone.

    python -m fleetune.tools.bench.adoption RUN.toml --methods fedavg,fedspu --seeds 0,1,2 [--unlike 3]

Every method is simulated twice, gated and as its paper has it (nothing held out); local-only once a seed.
Compared is what the devices serve in the end, on their own test samples, which are the same in all three. A
device is below alone when its score is lower than local-only's model has by more than the noise of its own
test samples: 1.645 standard errors of the paired difference, one-sided 95 %. By chance alone that happens to
one device in twenty. It is above alone when its score is higher. With --unlike 3 the devices 0, 3, 6, ... are
also counted apart, in brackets.

What was played is kept in --out, a line a method and seed, and not played again by the same command. The
table is of all lines of the run's source: means over seeds of the mean over devices, with the seeds' sample
standard deviation, and counts over all seeds' devices.
"""

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET, Struct
from msgspec.structs import replace

from fleetune.coordinator.store.stored_backbone import stored_backbone
from fleetune.edge_agent.extensions.adoption.deployed_model import read_deployed
from fleetune.edge_agent.training.local_training import LocalTrainer
from fleetune.edge_agent.training.trainers import make_backend
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.settings.adoption import AdoptionSection
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.run_toml import read_run
from fleetune.protocols.tasks import task_of
from fleetune.protocols.tasks.scores import Score
from fleetune.tools.simulator import runner, starting_models
from fleetune.tools.simulator.simulated_fleet import Shares, simulated_devices

LOCAL = "local-only"
METHODS = "fedavg,fedspu,kapc,fedpurin,srp-pfed,dc-pfl"
NOISE = 1.645  # standard errors: one-sided 95 %
HEADS = "| fleet | method | alone | ungated | above | below | gated | above | below | adopted |"


class Side(Struct, frozen=True, kw_only=True):
    """What a method's devices serve in the end, beside local-only's.

    Attributes:
        score: mean over devices, on their own test samples.
        gains: of each device over alone, above 0 is better; None where its test samples cannot tell.
        errors: their standard errors.
        adopted: devices that serve a model of the fleet; None: the run does not tell.
    """

    score: float
    gains: list[float | None]
    errors: list[float | None]
    adopted: int | None = None

    def above(self) -> list[bool]:
        """Of each device, whether its score is higher than alone."""
        return [one is not None and one > 0 for one in self.gains]

    def below(self) -> list[bool]:
        """Of each device, whether it is below alone by more than noise."""
        pairs = zip(self.gains, self.errors, strict=True)
        return [one is not None and error is not None and one < -NOISE * error for one, error in pairs]


class Line(Struct, frozen=True, kw_only=True):
    """A method in one seed."""

    source: str
    method: str
    seed: int
    alone: float
    ungated: Side
    gated: Side


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

    def beside(self, alone: "Served") -> Side:
        """Device by device beside what they have alone."""
        models = zip(self.trainers, self.weights, alone.weights, strict=True)
        gains = [trainer.gain(ours, theirs, "test") for trainer, ours, theirs in models]
        return Side(
            score=self.score,
            gains=[None if one is None else one.mean for one in gains],
            errors=[None if one is None else one.standard_error for one in gains],
            adopted=self.adopted,
        )


def played(settings: RunSettings, method: dict[str, Any], folder: Path) -> Served:
    """Simulate a run, and fetch the models that its devices serve."""
    settings = replace(settings, method=method)
    run, summary = runner.simulate(settings, folder, workers=0, fresh=True)
    run.store.close()
    spec, shares = run.enrolment.spec, Shares(settings)
    frozen = stored_backbone(folder, spec)
    backend = make_backend("torch", spec, None, 1, task=run.enrolment.learns, frozen=frozen)
    weights, trainers = [], []
    for device in simulated_devices(settings):
        found = read_deployed(starting_models.served(folder / "devices", device.name).read(), spec)
        assert found is not None, "every device has worked"
        weights.append(found.weights)
        trainers.append(LocalTrainer(backend, shares.of(device.index, spec), settings.training))
    return Served(weights, trainers, None if summary.adoption is UNSET else summary.adoption.adopted)


def lines(settings: RunSettings, methods: Iterable[str]) -> Iterator[Line]:
    """Play these methods, one line each."""
    gated = replace(settings, adoption=replace(settings.adoption, enabled=True))
    plain = replace(settings, adoption=AdoptionSection())
    with TemporaryDirectory() as folder:
        where = Path(folder) / "run"
        alone = played(plain, {"name": LOCAL}, where)
        for name in methods:
            section = {"name": name, **settings.compare.get(name, {})}
            yield Line(
                source=settings.data.source,
                method=name,
                seed=settings.run.seed,
                alone=alone.score,
                ungated=played(plain, section, where).beside(alone),
                gated=played(gated, section, where).beside(alone),
            )


def table(found: list[Line], every: int, score: Score) -> Iterator[str]:
    """The table's lines, one a method."""
    yield HEADS
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for method in dict.fromkeys(one.method for one in found):
        mine = [one for one in found if one.method == method]
        ungated, gated = [one.ungated for one in mine], [one.gated for one in mine]
        cells = [mine[0].source.rpartition(":")[2], method, _over_seeds([one.alone for one in mine], score)]
        for sides in (ungated, gated):
            cells += [
                _over_seeds([one.score for one in sides], score),
                _count([one.above() for one in sides], 0),
                _count([one.below() for one in sides], every),
            ]
        adopted = sum(one.adopted or 0 for one in gated)
        yield f"| {' | '.join(cells)} | {adopted} of {sum(len(one.gains) for one in gated)} |"


def _over_seeds(scores: list[float], score: Score) -> str:
    shown = np.array(scores) * (100 if score.share else 1)
    digits = 1 if score.share else 4
    spread = f" ± {shown.std(ddof=1):.{digits}f}" if len(shown) > 1 else ""
    return f"{shown.mean():.{digits}f}{spread}"


def _count(devices: list[list[bool]], every: int) -> str:
    """How many of all seeds' devices; with those that are unlike the others in brackets."""
    unlike = f" ({sum(sum(one[::every]) for one in devices)})" if every else ""
    return f"{sum(map(sum, devices))}{unlike}"


def kept(path: Path, source: str) -> list[Line]:
    """What was played before of this source."""
    if not path.exists():
        return []
    decoder = msgspec.json.Decoder(Line)
    return [one for one in decoder.decode_lines(path.read_bytes()) if one.source == source]


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("run", type=Path)
    options.add_argument("--methods", default=METHODS)
    options.add_argument("--seeds", default="0")
    options.add_argument("--source", help="another data.source than the file's")
    options.add_argument("--unlike", type=int, default=0, help="every so many devices one is unlike")
    options.add_argument("--out", type=Path, default=Path("adoption.jsonl"))
    asked = options.parse_args()
    settings = read_run(asked.run, *([[f"data.source={asked.source}"]] if asked.source else []))
    for seed in map(int, asked.seeds.split(",")):
        seeded = replace(settings, run=replace(settings.run, seed=seed))
        done = {one.method for one in kept(asked.out, settings.data.source) if one.seed == seed}
        missing = [one for one in asked.methods.split(",") if one not in done]
        for line in lines(seeded, missing) if missing else ():
            with asked.out.open("ab") as file:
                file.write(msgspec.json.encode(line) + b"\n")
    score = task_of(settings.task).score
    print("\n".join(table(kept(asked.out, settings.data.source), asked.unlike, score)))


if __name__ == "__main__":
    main()
