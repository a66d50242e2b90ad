"""The bundles that are included in Fleetune, so that a first run needs no torch.

`python -m fleetune.tools.ship_bundles` makes them. A test makes them again and compares.
"""

from functools import cache
from pathlib import Path

from fleetune.protocols.bundle.bundle import Bundle, read_bundle

FOLDER = Path(__file__).parent / "files"
# the demo's model, and the default model of `edge-agent profile`
MODELS = (("mlp", (1, 8, 8), 10), ("lenet5", (3, 32, 32), 10))


@cache
def shipped_bundle(name: str, input_shape: tuple[int, ...], num_classes: int) -> Bundle | None:
    """Return the included bundle of a built-in model; None if there is none for this input and number of
    classes.
    """
    path = bundle_path(name, input_shape, num_classes)
    return read_bundle(path.read_bytes()) if path.exists() else None


def bundle_path(name: str, input_shape: tuple[int, ...], num_classes: int) -> Path:
    """Return the path at which the bundle of a built-in model would be."""
    return FOLDER / f"{name}-{'x'.join(map(str, input_shape))}-{num_classes}.bundle"
