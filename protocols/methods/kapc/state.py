"""KAPC's coordinator state: the relationship cube and each device's latest layers."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.methods.kapc.relationship_cube import grow
from fleetune.protocols.model.spec import FlatArray


@dataclass(frozen=True)
class Coached:
    """Record of the targets sent to the last round's participants; rows in the order of participants.

    Attributes:
        own: share of each participant in its own target (r_ii), float64, shape (participants, L).
        reach: number of layers, from the first, that each one exchanges, int64, shape (participants,).
        sent: True at layers whose target was sent down, bool, shape (participants, L).
    """

    own: NDArray[np.float64]
    reach: NDArray[np.int64]
    sent: NDArray[np.bool_]


@dataclass(frozen=True)
class ServerState:
    """Coordinator state.

    Attributes:
        initial: initial weights of all devices, shape (spec.size,).
        devices: all admitted devices, ascending.
        related: devices that the cube covers, ascending; the other devices join it at the next plan.
        cube: R, float64, shape (len(related), layers, len(related)).
        latest: latest layers of each device that sent some, shape (spec.size,); `initial` elsewhere.
        uploaded: number of layers, from the first, in each device's last update.
        ratios: reported ratios; a missing device runs at 1.
        coached: record of the last planned round; None before the first.
    """

    initial: FlatArray
    devices: tuple[DeviceId, ...]
    related: tuple[DeviceId, ...]
    cube: NDArray[np.float64]
    latest: dict[DeviceId, FlatArray]
    uploaded: dict[DeviceId, int]
    ratios: dict[DeviceId, float] = field(default_factory=dict)
    coached: Coached | None = None

    @classmethod
    def of(cls, initial: FlatArray, num_layers: int) -> Self:
        """The state before any device is known."""
        return cls(initial, (), (), np.empty((0, num_layers, 0)), {}, {})

    def with_devices(self, newcomers: Iterable[DeviceId]) -> Self:
        """The state with these devices admitted. The cube grows only at the next plan, so that admitting a
        thousand devices does not copy it a thousand times.
        """
        return replace(self, devices=tuple(sorted({*self.devices, *newcomers})))

    def related_to_all(self) -> Self:
        """The state with a cube that covers every device admitted."""
        if self.related == self.devices:
            return self
        at = {device: place for place, device in enumerate(self.devices)}
        cube = grow(self.cube, [at[device] for device in self.related], len(self.devices))
        return replace(self, related=self.devices, cube=cube)

    def places(self, devices: Iterable[DeviceId]) -> list[int]:
        """Indices of these devices in the cube."""
        at = {device: place for place, device in enumerate(self.related)}
        return [at[device] for device in devices]

    def copies(self, devices: Iterable[DeviceId], layers: Iterable[slice]) -> list[list[FlatArray]]:
        """Latest received copy of each layer (outer) of each device (inner), as views."""
        weights = [self.latest.get(device, self.initial) for device in devices]
        return [[vector[where] for vector in weights] for where in layers]
