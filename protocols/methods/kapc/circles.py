"""Who exchanges which of KAPC's layers: at a device's ratio the first ones, so that circles grow smaller."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.methods.kapc.relationship_cube import Cube, Vector, server_model


@dataclass(frozen=True)
class Circle:
    """Consecutive layers that the same participants exchange.

    Attributes:
        layers: counted from 0.
        devices: the participants, ascending.
        shares: their part of the cube for these layers, shape (devices, layers, devices).
        copies: of each of the layers, of each of the devices, as last heard.
    """

    layers: range
    devices: tuple[DeviceId, ...]
    shares: Cube
    copies: Sequence[Sequence[Vector]]

    def targets(self, device: DeviceId, layers: Sequence[int]) -> list[Vector]:
        """A device's targets of those of `layers` that are in here, float64; none if it is not."""
        if device not in self.devices:
            return []
        chosen = [layer - self.layers.start for layer in layers if layer in self.layers]
        rows = self.shares[self.devices.index(device), chosen]
        return list(server_model(rows, [self.copies[layer] for layer in chosen]))


def circles(reach: Mapping[DeviceId, int]) -> Iterator[tuple[range, tuple[DeviceId, ...]]]:
    """The circles of participants of which each exchanges that many layers, from the first: in the order of
    layers. Layers beyond the largest reach are in none.
    """
    for start, stop in pairwise([0, *sorted(set(reach.values()))]):
        yield range(start, stop), tuple(device for device, own in reach.items() if own >= stop)
