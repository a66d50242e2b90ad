"""The bundles that come with Fleetune: what a first try needs, without torch.

Made by `python -m fleetune.tools.ship_bundles`; a test makes them again and compares.
"""

from functools import cache
from pathlib import Path

from fleetune.protocols.bundle.bundle import Bundle, read_bundle

FOLDER = Path(__file__).parent / "files"
# the demo's model, and what `edge-agent profile` trains when it is not told what
MODELS = (("mlp", (1, 8, 8), 10), ("lenet5", (3, 32, 32), 10))


@cache
def shipped_bundle(name: str, input_shape: tuple[int, ...], num_classes: int) -> Bundle | None:
    """None: there is none for this model, for this input and this number of classes."""
    path = bundle_path(name, input_shape, num_classes)
    return read_bundle(path.read_bytes()) if path.exists() else None


def bundle_path(name: str, input_shape: tuple[int, ...], num_classes: int) -> Path:
    """Where the bundle of a built-in model stands."""
    return FOLDER / f"{name}-{'x'.join(map(str, input_shape))}-{num_classes}.bundle"
