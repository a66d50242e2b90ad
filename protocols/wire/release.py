"""What travels of a roll-out: which version of the shared model a device may serve, and what it says of it.

A version is the shared model as it stood after a round, and has that round's number; version 0 is what the
run began with. It travels once to each device that is to serve it.
"""

from dataclasses import dataclass
from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from fleetune.protocols.bounds import Finite, NonNegative, Number, NumSamples
from fleetune.protocols.model.spec import FlatArray

MOST_HELD = 2  # versions that a device holds


@dataclass(frozen=True)
class Version:
    """A version of the shared model.

    Attributes:
        number: of the round after which it stood.
        weights: shape (spec.num_parameters,); left out where the device has said that it has them, and of
            version 0.
    """

    number: Number
    weights: FlatArray | UnsetType = UNSET


@dataclass(frozen=True)
class Release:
    """What a device may serve.

    Attributes:
        approved: the newest version that is out for all.
        trial: the one on trial; for canaries alone.
    """

    approved: Version
    trial: Version | UnsetType = UNSET


@dataclass(frozen=True)
class Comparison:
    """The version on trial against the one before, on a canary's own held-out samples.

    Attributes:
        new, old: their numbers.
        gain: how much lower the mean loss of the new one is; below 0 it is worse.
        error: standard error of `gain`.
        by_samples: how many equally weighted samples that is by.
    """

    new: Number
    old: Number
    gain: Finite
    error: NonNegative
    by_samples: NumSamples


@dataclass(frozen=True)
class ReleaseWord:
    """What a device says of the versions with its reply.

    Attributes:
        holds: versions whose weights it has.
        found: of a canary that can judge the one on trial.
    """

    holds: Annotated[tuple[Number, ...], Meta(max_length=MOST_HELD)] = ()
    found: Comparison | UnsetType = UNSET
