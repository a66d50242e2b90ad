"""Makes the bundles that come with Fleetune: python -m fleetune.tools.ship_bundles."""

from fleetune.coordinator.export.make_bundle import make_bundle
from fleetune.protocols.bundle.bundle import Bundle
from fleetune.protocols.bundle.shipped import MODELS, bundle_path
from fleetune.protocols.files import write_atomically
from fleetune.protocols.wire.payloads import run_key


def main() -> None:
    for name, input_shape, num_classes in MODELS:
        path = bundle_path(name, input_shape, num_classes)
        data = shipped_bundle(name, input_shape, num_classes).encoded()
        write_atomically(path, data, mode=None)
        print(f"{path}: {len(data):,} bytes")


def shipped_bundle(name: str, input_shape: tuple[int, ...], num_classes: int) -> Bundle:
    """Return a bundle as it is shipped."""
    return make_bundle(name, input_shape, num_classes, run_key(0).child("weights"))


if __name__ == "__main__":
    main()
