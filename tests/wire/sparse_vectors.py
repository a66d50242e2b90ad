"""The vectors of `sparse`: `python -m tests.wire.sparse_vectors` writes them anew."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from fleetune.protocols.randomness import Key
from fleetune.protocols.update.encodings.encoding import Known
from fleetune.protocols.update.encodings.sparse import Sparse

PATH = Path(__file__).parent / "sparse.json"
ABOUT = (
    "values written by sparse (docs/wire.md, Encodings): base and decoded are little-endian float32 in hex,"
    " tensors the number of each entry's tensor (empty: all are of one), row_sizes the entries a row of each"
    " tensor has (empty: not known), places each entry's place in its tensor (null: tensors are whole), data"
    " the bytes"
)


def changes(count: int, row_size: int) -> Any:
    """What differs much from row to row and from column to column, shape (count,)."""
    draw = Key.of("wire", "sparse").generator()
    rows, columns = draw.gamma(0.4, 1, -(-count // row_size)), draw.gamma(0.4, 1, row_size)
    sizes = np.outer(rows, columns).ravel()[:count]
    return (draw.laplace(0, 1, count) * sizes).astype("<f4")


def written(
    what: str,
    values: Any,
    reference: Any,
    density: float,
    levels: int,
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
    data = Sparse(density=density, levels=levels).encode(values, known, None, Key(1)).data
    return {
        "what": what,
        "count": values.size,
        "base": None if known.reference is None else known.reference.tobytes().hex(),
        "tensors": known.tensors.tolist(),
        "row_sizes": list(known.row_sizes),
        "places": None if known.places is None else known.places.tolist(),
        "data": data.hex(),
        "decoded": Sparse().decode(data, values.size, known).astype("<f4").tobytes().hex(),
    }


def vectors() -> list[dict[str, Any]]:
    """All of them."""
    reference = Key.of("wire", "base").generator().normal(0, 1, 600).astype("<f4")
    values, tensors = reference + changes(600, 30), np.repeat([0, 2, 5], [360, 6, 234])
    rows = (30, 1, 1, 1, 1, 18)
    half = np.flatnonzero(np.arange(600) % 30 < 15)
    return [
        written("three values", [0.5, -0.25, 0.126], [0.5, -0.251, 0.125], 1.0, 2),
        written("no values", [], [], 1.0, 2),
        written("nothing changed", [1, 2], [1, 2], 1.0, 2),
        written("three values without a base", [0.5, 0, -0.126], None, 1.0, 1),
        written("the ends of float32", [1e-45, -3e38, 0, 1.2e-38], None, 1.0, 16),
        written("three tensors", values, reference, 0.1, 8, tensors, rows),
        written("three tensors, all entries", values, reference, 1.0, 3, tensors, rows),
        written("rows not known", values, reference, 0.1, 1, tensors),
        written("half of the columns", values[half], reference[half], 0.2, 4, [], [30], half),
    ]


if __name__ == "__main__":
    lines = ",\n".join(json.dumps(one) for one in vectors())
    PATH.write_text(f'{{"about": {json.dumps(ABOUT)}, "vectors": [\n{lines}\n]}}\n')
