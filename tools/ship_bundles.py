"""Make the bundles that come with Fleetune anew: python -m tools.ship_bundles."""

from coordinator.export.make import make_bundle
from protocols.bundle import Bundle
from protocols.files import write_atomically
from protocols.payloads import run_key
from protocols.shipped import MODELS, bundle_path


def main() -> None:
    for name, input_shape, num_classes in MODELS:
        path = bundle_path(name, input_shape, num_classes)
        data = made(name, input_shape, num_classes).encoded()
        write_atomically(path, data)
        print(f"{path}: {len(data):,} bytes")


def made(name: str, input_shape: tuple[int, ...], num_classes: int) -> Bundle:
    """As it is shipped."""
    return make_bundle(name, input_shape, num_classes, run_key(0).child("weights"))


if __name__ == "__main__":
    main()
