"""Circles: runs of KAPC's layers with the participants that exchange them.

A device's ratio limits it to the first layers, so later layers have smaller circles.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.methods.kapc.relationship_cube import Cube, Vector, server_model


@dataclass(frozen=True)
class Circle:
    """Consecutive layers that the same participants exchange.

    Attributes:
        layers: numbers of the layers, from 0.
        devices: participants, ascending.
        shares: part of the cube for these layers, shape (devices, layers, devices).
        copies: latest received copy of each layer (outer) of each device (inner).
    """

    layers: range
    devices: tuple[DeviceId, ...]
    shares: Cube
    copies: Sequence[Sequence[Vector]]

    def targets(self, device: DeviceId, layers: Sequence[int]) -> list[Vector]:
        """The device's float64 targets for the `layers` in this circle; empty if the device is not in it."""
        if device not in self.devices:
            return []
        chosen = [layer - self.layers.start for layer in layers if layer in self.layers]
        rows = self.shares[self.devices.index(device), chosen]
        return list(server_model(rows, [self.copies[layer] for layer in chosen]))


def circles(reach: Mapping[DeviceId, int]) -> Iterator[tuple[range, tuple[DeviceId, ...]]]:
    """Circles in the order of layers, if each participant exchanges its first `reach[device]` layers.

    Layers beyond the largest reach are in no circle.
    """
    for start, stop in pairwise([0, *sorted(set(reach.values()))]):
        yield range(start, stop), tuple(device for device, own in reach.items() if own >= stop)
