"""The vectors of masks: `python -m tests.wire.mask_vectors` writes them anew."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from fleetune.protocols.model.spec import ModelSpec, TensorSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.masks.coded_mask import evenly, predicted, read_mask
from fleetune.protocols.update.reference_model import ReferenceModel

PATH = Path(__file__).parent / "masks.json"
ABOUT = (
    "masks (docs/wire.md, Masks): shapes those of the model's tensors, base little-endian float32 in hex"
    " (null: there is none), held which of it both sides hold and mask the flags, as bitmaps in hex, the"
    " first in the highest bit; data the bytes"
)
SHAPES = ((12, 30), (12,), (8, 4, 3, 3))  # 660 entries


def model(shapes: Any) -> ModelSpec:
    """Of tensors that have these shapes."""
    tensors = (
        TensorSpec(f"t{i}", tuple(shape), "weight", f"t{i}", ((),) * len(shape))
        for i, shape in enumerate(shapes)
    )
    return ModelSpec("vectors", tuple(tensors), (), (1,), 2)


def bitmap(flags: Any) -> str:
    return np.packbits(flags).tobytes().hex()


def vector(
    what: str, mask: Any, data: bytes, reference: ReferenceModel | None = None, shapes: Any = ()
) -> dict[str, Any]:
    """One vector."""
    assert (read_mask(data, mask.size, model(shapes), reference) == mask).all()
    return {
        "what": what,
        "count": mask.size,
        "shapes": [list(shape) for shape in shapes],
        "base": None if reference is None else reference.values.astype("<f4").tobytes().hex(),
        "held": None if reference is None else bitmap(reference.held),
        "mask": bitmap(mask),
        "data": data.hex(),
    }


def small_ones(count: int, row_size: int) -> tuple[Any, ReferenceModel]:
    """What is small in magnitude, each third row left out, and a base a little beside the model."""
    draw = Key.of("wire", "masks").generator()
    values = draw.normal(0, 1, count)
    reference = ReferenceModel((values + draw.normal(0, 0.1, count)).astype("<f4"), draw.random(count) < 0.9)
    reference.values[~reference.held] = 0
    return (np.abs(values) < 0.7) & (np.arange(count) // row_size % 3 > 0), reference


def vectors() -> list[dict[str, Any]]:
    """All of them."""
    draw = Key.of("wire", "even").generator()
    mask, reference = small_ones(660, 30)
    of_model = model(SHAPES)
    ten = np.arange(10) % 3 == 0
    return [
        vector("ten flags", ten, evenly(ten)),
        vector("ten flags, predicted", ten, predicted(ten, of_model, None)),
        vector("all false", np.zeros(500, bool), evenly(np.zeros(500, bool))),
        *(
            vector(f"{share:g} of all", drawn, evenly(drawn))
            for share in (0.002, 0.05, 0.3, 0.95)
            for drawn in [draw.random(2000) < share]
        ),
        vector("no model, predicted", mask, predicted(mask, model([(1,)]), None)),
        vector("three tensors, no base", mask, predicted(mask, of_model, None), None, SHAPES),
        vector("three tensors", mask, predicted(mask, of_model, reference), reference, SHAPES),
    ]


if __name__ == "__main__":
    lines = ",\n".join(json.dumps(one) for one in vectors())
    PATH.write_text(f'{{"about": {json.dumps(ABOUT)}, "vectors": [\n{lines}\n]}}\n')
