"""The vectors of encodings: `python -m tests.wire.vectors` writes them anew.

Each is what this release wrote: `data` may differ with another zstd, but is read for ever.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from fleetune.protocols.randomness import Key
from fleetune.protocols.update import encodings
from fleetune.protocols.update.encodings.encoding import Known

PATH = Path(__file__).parent / "encodings.json"
NAMES = ("lossless", "int8", "int4", "sketch", "peaks")
ABOUT = (
    "values written by each encoding (docs/wire.md, Encodings): base and decoded are little-endian float32 in"
    " hex, tensors the number of each entry's tensor (empty: all are of one), data the bytes"
)


def written(
    name: str, what: str, values: Any, reference: Any, tensors: Any = (), **settings: float
) -> dict[str, Any]:
    """One vector."""
    known = Known(None if reference is None else np.asarray(reference, "<f4"), np.asarray(tensors, np.int16))
    values = np.asarray(values, "<f4")
    encoding = encodings.chosen({"name": name, **settings})
    data = encoding.encode(values, known, None, Key(1)).data
    return {
        "encoding": name,
        "what": what,
        "count": values.size,
        "base": None if known.reference is None else known.reference.tobytes().hex(),
        "tensors": known.tensors.tolist(),
        "data": data.hex(),
        "decoded": encoding.decode(data, values.size, known).astype("<f4").tobytes().hex(),
    }


def steps(count: int) -> tuple[Any, Any]:
    """A base and trained values: a third of them unchanged, a few far away."""
    draw = Key.of("wire").generator()
    reference = draw.normal(0, 0.05, count)
    moved = draw.normal(0, 1e-3, count) * (draw.random(count) < 0.67)
    moved[:: max(1, count // 7)] *= 1000
    return reference.astype(np.float32), (reference.astype(np.float32) + moved).astype(np.float32)


def vectors() -> list[dict[str, Any]]:
    """All of them."""
    found = []
    reference, values = steps(300)
    tensors = np.repeat([0, 1, 5], [9, 140, 151])
    extremes = [0.0, -0.0, 1e-45, -1e-38, 3.4028235e38, -3.4028235e38, 1.0]
    for name in NAMES:
        found += [
            written(name, "three values", [0.5, -0.25, 0.126], [0.5, -0.251, 0.125]),
            written(name, "no values", [], []),
            written(name, "three values without a base", [0.5, -0.25, 0.126], None),
            written(name, "the ends of float32", extremes, extremes[::-1]),
            written(name, "training, three tensors", values, reference, tensors),
        ]
    of_both = "products and sums", values, reference, tensors
    return [*found, written("sketch", *of_both, step=2.0, bits=0.3)]


if __name__ == "__main__":
    lines = ",\n".join(json.dumps(one) for one in vectors())
    PATH.write_text(f'{{"about": {json.dumps(ABOUT)}, "vectors": [\n{lines}\n]}}\n')
