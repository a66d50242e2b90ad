"""What encodings of values make of bytes that were changed: `python -m tests.fuzz.encodings [--packets N]`.

N are read by each encoding of the registry, or by those that are named. Exits with 1 when one neither gives
as many float32 as were asked for nor is refused by a PacketError, takes seconds, or grows the process.
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

from fleetune.protocols.errors import PacketError
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.randomness import Key
from fleetune.protocols.update import encodings
from fleetune.protocols.update.encodings.encoding import Encoding, Known

SIZES = (0, 1, 3, 64, 200, 1000)
LAYOUTS = ("nothing", "tensors", "rows", "scattered")
_TENSOR, _ROW = 300, 20  # entries


def fuzz(encoding: Encoding, seed: int, count: int) -> Counter[str]:
    """Verdicts on `count` changed byte strings by name. Raises AssertionError, or whatever escapes."""
    rng, verdicts = random.Random(seed), Counter[str]()
    honest = [
        _written(encoding, size, based, layout)
        for size in SIZES
        for based in (False, True)
        for layout in LAYOUTS
    ]
    before = resident()
    with np.errstate(all="ignore"):
        for _ in range(count):
            data, known, size = rng.choice(honest)
            size = rng.choice((size, size, size, size + 1, rng.choice(SIZES)))
            base = None if known.reference is None or rng.random() < 0.1 else np.resize(known.reference, size)
            known = _known(base, size, rng.choice(LAYOUTS))
            verdicts[_verdict(encoding, changed_bytes(rng, data), size, known)] += 1
    grown = resident() - before
    assert grown <= MOST_BYTES, f"the process grew by {grown} bytes"
    return verdicts


def _written(encoding: Encoding, size: int, based: bool, layout: str) -> tuple[bytes, Known, int]:
    draw = Key.of("fuzz", size).generator()
    base = draw.normal(0, 0.05, size).astype(np.float32)
    steps = draw.normal(0, 1e-3, size) * (draw.random(size) < 0.3)
    known = _known(base if based else None, size, layout)
    if known.row_sizes:
        places = np.arange(size) % _TENSOR if known.places is None else known.places
        steps += 1e-2 * np.sin(places // _ROW) * np.cos(places % _ROW)  # an outer product
    return encoding.encode((base + steps).astype(np.float32), known, None, Key(size)).data, known, size


def _known(base: FlatArray | None, size: int, layout: str) -> Known:
    """What is known of so many entries but their base: nothing, tensors, their rows, or places in these."""
    if layout == "nothing":
        return Known(base)
    tensors, at = np.divmod(np.arange(size), _TENSOR)
    rows = (_ROW,) * 4 if layout in ("rows", "scattered") else ()
    places = (at * 3 // 2).astype(np.int32) if layout == "scattered" else None
    return Known(base, tensors.astype(np.int16), rows, places)


def _verdict(encoding: Encoding, data: bytes, size: int, known: Known) -> str:
    began = time.thread_time()
    try:
        values = encoding.decode(data, size, known)
    except PacketError as problem:
        verdict = type(problem).__name__
    else:
        verdict = "read"
        assert values.shape == (size,)
        assert values.dtype == np.float32
    assert time.thread_time() - began < MOST_SECONDS
    return verdict


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.fuzz.encodings", description=__doc__)
    parser.add_argument("names", nargs="*", default=list(encodings.REGISTRY))
    parser.add_argument("--packets", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    os.nice(10)
    failed = False
    for name in chosen.names:
        try:
            print(name, dict(fuzz(encodings.find(name), chosen.seed, chosen.packets)), flush=True)
        except Exception as fault:  # noqa: BLE001 - this is what is looked for
            failed = True
            print(f"{name}: {type(fault).__name__}: {fault}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
