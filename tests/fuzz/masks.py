"""What the coder of masks makes of bytes that were changed: `python -m tests.fuzz.masks [--packets N]`.

Exits with 1 when one neither gives as many flags as were asked for nor is refused by a PacketError, takes
seconds, or grows the process.
"""

import argparse
import os
import random
import sys
import time
from collections import Counter

import numpy as np
from tests.fuzz.mutation import changed_bytes
from tests.fuzz.run import MOST_BYTES, MOST_SECONDS, resident
from tests.wire.mask_vectors import model

from fleetune.protocols.errors import PacketError
from fleetune.protocols.model.spec import MaskArray, ModelSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.masks.coded_mask import evenly, predicted, read_mask
from fleetune.protocols.update.reference_model import ReferenceModel

SHAPES = [[(3,)], [(8, 5), (8,)], [(4, 3, 3, 3), (4,), (20, 30)]]


def fuzz(seed: int, count: int) -> Counter[str]:
    """Verdicts on `count` changed byte strings by name. Raises AssertionError, or whatever escapes."""
    rng, verdicts = random.Random(seed), Counter[str]()
    honest = [each for shapes in SHAPES for each in _written(model(shapes))]
    before = resident()
    for _ in range(count):
        data, spec, base = rng.choice(honest)
        size = rng.choice((spec.size, spec.size, spec.size - 1, 1, rng.randrange(1, spec.size + 1)))
        verdicts[_verdict(changed_bytes(rng, data), size, spec, rng.choice((base, base, base, None)))] += 1
    grown = resident() - before
    assert grown <= MOST_BYTES, f"the process grew by {grown} bytes"
    return verdicts


def _written(spec: ModelSpec) -> list[tuple[bytes, ModelSpec, ReferenceModel | None]]:
    draw = Key.of("fuzz", "masks", spec.size).generator()
    values = draw.normal(0, 1, spec.size).astype(np.float32)
    base = ReferenceModel(values, draw.random(spec.size) < 0.7)
    masks: list[MaskArray] = [draw.random(spec.size) < share for share in (0.02, 0.4)]
    masks.append(np.abs(values) < 0.5)
    return [
        each
        for mask in masks
        for each in (
            (evenly(mask), spec, base),
            (predicted(mask, spec, base), spec, base),
            (predicted(mask, spec, None), spec, None),
        )
    ]


def _verdict(data: bytes, size: int, spec: ModelSpec, base: ReferenceModel | None) -> str:
    began = time.thread_time()
    try:
        flags = read_mask(data, size, spec, base)
    except PacketError as problem:
        verdict = type(problem).__name__
    else:
        verdict = "read"
        assert flags.shape == (size,)
        assert flags.dtype == np.bool_
        assert flags.view(np.uint8).max() <= 1
    assert time.thread_time() - began < MOST_SECONDS
    return verdict


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.fuzz.masks", description=__doc__)
    parser.add_argument("--packets", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    os.nice(10)
    try:
        print(dict(fuzz(chosen.seed, chosen.packets)))
    except Exception as fault:  # noqa: BLE001 - this is what is looked for
        print(f"{type(fault).__name__}: {fault}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
