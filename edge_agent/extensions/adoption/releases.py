"""The versions of the shared model that a device holds in runs with `adoption.canary`.

The coordinator announces the version that is approved for all devices and, to a canary, the version on trial
(`coordinator.rounds`). A device deploys the newest version that it receives, if the adoption rule allows it.
The version gets the device's own running statistics, which no round averages. Until the first version is
approved, the device keeps the model that it deployed when the run started.
"""

from dataclasses import dataclass

import numpy as np
from msgspec import UNSET

from fleetune.protocols.errors import PacketCorrupt
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.wire.release import Release, Version


@dataclass(frozen=True)
class HeldVersion:
    """A version of the shared model on a device.

    Attributes:
        number: number of the version, see `Version`.
        weights: shape (spec.size,), with the device's own running statistics.
    """

    number: int
    weights: FlatArray


@dataclass(frozen=True)
class Releases:
    """The versions that a device holds.

    Attributes:
        out: number of the approved version; 0 if none is approved.
        approved: the approved version; None if the device does not have it.
        trial: the version on trial; None if this device is not a canary.
    """

    out: int = 0
    approved: HeldVersion | None = None
    trial: HeldVersion | None = None

    @property
    def newest(self) -> HeldVersion | None:
        """The version that the device may deploy; None if there is none yet."""
        return self.trial or self.approved

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the versions that the device holds."""
        return tuple(one.number for one in (self.approved, self.trial) if one is not None)

    def taken_in(self, release: Release, personal: FlatArray, spec: ModelSpec) -> "Releases":
        """The versions that the device holds after a task.

        Args:
            release: the release that the task carries.
            personal: the device's own model, shape (spec.size,).
            spec: structure of the model.

        Raises:
            PacketCorrupt: the weights do not fit this model.
        """
        trial = None if release.trial is UNSET else self._held(release.trial, personal, spec)
        return Releases(release.approved.number, self._held(release.approved, personal, spec), trial)

    def withdrawn(self, since: "Releases") -> int:
        """Number of the earlier trial version that the device must stop deploying; 0 if none."""
        before = since.trial.number if since.trial is not None else 0
        return 0 if before in self.numbers else before

    def _held(self, version: Version, personal: FlatArray, spec: ModelSpec) -> HeldVersion | None:
        if version.weights is UNSET:
            return next(
                (one for one in (self.approved, self.trial) if one and one.number == version.number), None
            )
        if version.weights.shape != (spec.num_parameters,):
            raise PacketCorrupt(f"version {version.number} of the shared model does not fit the model")
        own = personal[spec.num_parameters :]
        return HeldVersion(version.number, np.concatenate([version.weights, own]).astype(np.float32))
