"""Masks that devices truly send, on the wire: bytes as bitmaps and coded, over the entropy of as many bits.

    python -m fleetune.tools.bench.masks --out masks.json

Rounds are played as `trained_differences.py` says, one run a seed, the first left out. Updates are
written as in a run with `[encoding] up = "lossless"`, tasks as they are. Of each mask that is neither empty
nor full: the bytes of its bitmap, compressed alone; those that travel; and n H(p) / 8, the entropy of n flags
of which a share p is True. Speeds are of one core's time, for flags whose mask is coded.
"""

import json
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import numpy as np
import typer
import zstandard

from fleetune.protocols.model.spec import MaskArray, ModelSpec
from fleetune.protocols.one_line import one_line_errors
from fleetune.protocols.randomness import Key
from fleetune.protocols.update import codec, encodings
from fleetune.protocols.update.arrays import WireArray
from fleetune.protocols.update.base import Base
from fleetune.protocols.update.masks.coded_mask import read_mask
from fleetune.protocols.update.patch_values import PatchWriter
from fleetune.tools.bench.trained_differences import Fleet, played

RATIOS = {"cd2-pfed": 0.4}  # of devices; 1.0 where a method is not named


@dataclass
class Counting(PatchWriter):
    """A writer that counts what its masks take.

    Attributes:
        figures: sums over all masks.
    """

    figures: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def write_mask(self, mask: MaskArray) -> WireArray | None:
        began = time.process_time()
        coded = super().write_mask(mask)
        seconds, share = time.process_time() - began, float(mask.mean())
        if 0 < share < 1:
            bitmap = np.packbits(mask.ravel()).tobytes()
            plain = len(zstandard.ZstdCompressor(level=codec.ZSTD_LEVEL).compress(bitmap))
            entropy = -share * np.log2(share) - (1 - share) * np.log2(1 - share)
            self.figures["bound"] += mask.size * float(entropy) / 8
            self.figures["bitmap"] += plain
            self.figures["coded"] += plain if coded is None else len(coded[2])
            if coded is not None:
                self.figures["flags"] += mask.size
                self.figures["encode_s"] += seconds
                self.figures["decode_s"] += self._seconds_to_read(mask, coded[2])
        return coded

    def _seconds_to_read(self, mask: MaskArray, data: bytes) -> float:
        began = time.process_time()
        found = read_mask(data, mask.size, self.spec, self.base)
        seconds = time.process_time() - began
        assert np.array_equal(found, mask.ravel())
        return seconds


def measured(method: str, fleet: Fleet) -> dict[str, float]:
    """Sums over the masks of all updates but the first round's."""
    enrolment, turns = played(method, fleet)
    spec: ModelSpec = enrolment.spec
    figures = defaultdict[str, float](float)
    for turn in turns:
        if turn.round > 1:
            base = Base.of_task(turn.task, spec)
            writer = Counting(encodings.find("lossless"), spec, Key(1), base=base, figures=figures)
            codec.encode(turn.update, spec, writer=writer)
    return dict(figures)


def main(
    models: Annotated[str, typer.Option(help="comma-separated")] = "lenet5,cnn-kapc",
    methods: Annotated[
        str, typer.Option(help="comma-separated")
    ] = "srp-pfed,fedpurin,fedcac,lotteryfl,cd2-pfed",
    devices: Annotated[int, typer.Option(help="that take part in every round")] = 4,
    samples: Annotated[int, typer.Option(help="of each device")] = 500,
    rounds: Annotated[int, typer.Option(help="of each run")] = 6,
    seeds: Annotated[int, typer.Option(help="runs of each method, from seed 0")] = 3,
    out: Annotated[Path | None, typer.Option(help="JSON file for all figures")] = None,
) -> None:
    """Hold coded masks against bitmaps and entropy."""
    found = dict[str, Any]()
    with one_line_errors("bench_masks"):
        for model in models.split(","):
            for method in methods.split(","):
                runs = []
                for seed in range(seeds):
                    fleet = Fleet(model, devices, samples, 1, rounds, RATIOS.get(method, 1.0), seed)
                    runs.append(measured(method, fleet))
                found[f"{model}, {method}"] = runs
                print(_line(f"{model}, {method}", runs), flush=True)
                if out is not None:
                    out.write_text(json.dumps(found, indent=1))


def _line(name: str, runs: list[dict[str, float]]) -> str:
    masked = [run for run in runs if run.get("bound")]
    if not masked:
        return f"| {name} | no masks | |"
    bitmap = mean(run["bitmap"] / run["bound"] for run in masked)
    shares = [run["coded"] / run["bound"] for run in masked]
    flags = sum(run.get("flags", 0) for run in masked)
    encode, decode = (sum(run.get(key, 0) for run in masked) for key in ("encode_s", "decode_s"))
    speed = f"{flags / encode / 1e6:.1f}, {flags / decode / 1e6:.1f}" if flags else "bitmaps"
    spread = f"{min(shares):.3f} to {max(shares):.3f}"
    return f"| {name} | {bitmap:.3f} | {mean(shares):.3f} ({spread}) | {speed} |"


if __name__ == "__main__":
    sys.exit(typer.run(main))
