"""The vectors of `lowrank`: `python -m tests.wire.lowrank_vectors` writes them anew."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from fleetune.protocols.randomness import Key
from fleetune.protocols.update.encodings.encoding import Known
from fleetune.protocols.update.encodings.lowrank import LowRank

PATH = Path(__file__).parent / "lowrank.json"
ABOUT = (
    "values written by lowrank (docs/wire.md, Encodings): base and decoded are little-endian float32 in hex,"
    " tensors the number of each entry's tensor (empty: all are of one), row_sizes the entries a row of each"
    " tensor has (empty: not known), places each entry's place in its tensor (null: tensors are whole), data"
    " the bytes"
)


def changes(rows: int, columns: int, rank: int = 3) -> Any:
    """A few outer products and a little of everything else, shape (rows * columns,)."""
    draw = Key.of("wire", "lowrank").generator()
    left = draw.normal(0, 1, (rows, rank)) * 0.5 ** np.arange(rank)
    products = left @ draw.laplace(0, 1, (rank, columns))
    return (products + draw.normal(0, 0.05, (rows, columns))).astype("<f4").ravel()


def written(
    what: str,
    values: Any,
    reference: Any,
    step: float,
    tensors: Any = (),
    rows: Any = (),
    places: Any = None,
) -> dict[str, Any]:
    """One vector."""
    known = Known(
        None if reference is None else np.asarray(reference, "<f4"),
        np.asarray(tensors, np.int16),
        tuple(rows),
        None if places is None else np.asarray(places, np.int32),
    )
    values = np.asarray(values, "<f4")
    data = LowRank(step).encode(values, known, None, Key(1)).data
    return {
        "what": what,
        "count": values.size,
        "base": None if known.reference is None else known.reference.tobytes().hex(),
        "tensors": known.tensors.tolist(),
        "row_sizes": list(known.row_sizes),
        "places": None if known.places is None else known.places.tolist(),
        "data": data.hex(),
        "decoded": LowRank().decode(data, values.size, known).astype("<f4").tobytes().hex(),
    }


def vectors() -> list[dict[str, Any]]:
    """All of them."""
    reference = Key.of("wire", "base").generator().normal(0, 1, 966).astype("<f4")
    tensors = np.repeat([0, 2, 5], [600, 6, 360])
    values, rows = (
        reference + np.concatenate([changes(20, 30), np.ones(6, "f4"), changes(20, 18)]),
        (30, 1, 1, 1, 1, 18),
    )
    half = np.flatnonzero(np.arange(600) % 30 < 15)
    scattered = np.flatnonzero(np.arange(600) % 7 < 3)
    most = np.flatnonzero(Key.of("wire", "mask").generator().random(600) < 0.7)
    mixed = values[:600] + np.where(np.arange(600) % 37 == 5, 3, 0).astype("f4")
    thin = np.flatnonzero(np.arange(966) % 11 % 3 == 1)
    of_tensor = np.concatenate([np.arange(size) for size in (600, 6, 360)])
    return [
        written("three values", [0.5, -0.25, 0.126], [0.5, -0.251, 0.125], 0.5),
        written("no values", [], [], 1.0),
        written("nothing changed", [1, 2], [1, 2], 1.0),
        written("three values without a base", [0.5, 0, -0.126], None, 0.01),
        written("the ends of float32", [1e-45, -3e38, 0, 1.2e-38], None, 1.0),
        written("steps that are next to nothing", values[:600], reference[:600], 1e-5, (), (30,)),
        written("three tensors", values, reference, 1.0, tensors, rows),
        written("three tensors, in coarse steps", values, reference, 5.0, tensors, rows),
        written("rows not known", values, reference, 1.0, tensors),
        written("half of the columns", values[half], reference[half], 0.7, [], [30], half),
        written("scattered entries", values[scattered], reference[scattered], 0.7, [], [30], scattered),
        written("seven in ten entries", values[most], reference[most], 0.7, [], [30], most),
        written(
            "scattered entries, in fine steps",
            values[scattered],
            reference[scattered],
            0.02,
            [],
            [30],
            scattered,
        ),
        written(
            "products, and entries of what they leave", mixed[most], reference[most], 0.4, [], [30], most
        ),
        written(
            "a part of three tensors",
            values[thin],
            reference[thin],
            2.0,
            tensors[thin],
            rows,
            of_tensor[thin],
        ),
    ]


if __name__ == "__main__":
    lines = ",\n".join(json.dumps(one) for one in vectors())
    PATH.write_text(f'{{"about": {json.dumps(ABOUT)}, "vectors": [\n{lines}\n]}}\n')
