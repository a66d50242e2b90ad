"""A roll-out's data on the wire: the versions that a device may deploy, and the device's report on them.

A version is the shared model after a round, and has that round's number. Version 0 is the model with which
the run began. A version is sent once to each device that may deploy it.
"""

from dataclasses import dataclass
from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from fleetune.protocols.bounds import Finite, NonNegative, Number, NumSamples
from fleetune.protocols.model.spec import FlatArray

MOST_HELD = 2  # largest number of versions that a device holds


@dataclass(frozen=True)
class Version:
    """A version of the shared model.

    Attributes:
        number: number of the round that produced it.
        weights: weights of the version, shape (spec.num_parameters,); omitted for version 0, and if the
            device has reported that it has them.
    """

    number: Number
    weights: FlatArray | UnsetType = UNSET


@dataclass(frozen=True)
class Release:
    """The versions that a device may deploy.

    Attributes:
        approved: the newest version that is approved for all devices.
        trial: the version on trial; for canaries only.
    """

    approved: Version
    trial: Version | UnsetType = UNSET


@dataclass(frozen=True)
class Comparison:
    """A canary's comparison of the version on trial with the version before, on its own held-out samples.

    Attributes:
        new, old: numbers of the two versions.
        gain: mean loss of the old version minus that of the new version; below 0 the new version is worse.
        error: standard error of `gain`.
        by_samples: effective number of equally weighted samples.
    """

    new: Number
    old: Number
    gain: Finite
    error: NonNegative
    by_samples: NumSamples


@dataclass(frozen=True)
class ReleaseWord:
    """A device's report on the versions, sent with its reply.

    Attributes:
        holds: numbers of the versions whose weights it has.
        found: comparison by a canary that can evaluate the version on trial.
    """

    holds: Annotated[tuple[Number, ...], Meta(max_length=MOST_HELD)] = ()
    found: Comparison | UnsetType = UNSET
