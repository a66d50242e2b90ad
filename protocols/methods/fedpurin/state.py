"""FedPURIN's states of coordinator and device, and the types of task and update."""

from dataclasses import dataclass, field

from fleetune.protocols.bounds import Number, NumSamples, Ratio
from fleetune.protocols.method.critical_parameters import Collaboration
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.model.spec import FlatArray, MaskArray
from fleetune.protocols.update.patch import Patch


@dataclass(frozen=True)
class Held:
    """The coordinator's record of a device.

    Attributes:
        number: round of its latest update.
        critical: m_i, shape (spec.size,).
        collaborated: delta_i at the critical entries, shape (critical.sum(),); None if the device keeps its
            own values there.
    """

    number: int
    critical: MaskArray
    collaborated: FlatArray | None


@dataclass(frozen=True)
class ServerState:
    """Coordinator state.

    Attributes:
        weights: bar, shape (spec.size,); normalisation layers keep their initial values.
        number: t of the present round.
        merged: True if `weights` is a bar, False if it is the initial model.
        ratios: ratio that each device's budget allows, an upper bound of its tau.
        held: record of every device that has sent an update.
        collaboration: overlaps of the last round's devices; None if they were not computed.
    """

    weights: FlatArray
    number: int = 0
    merged: bool = False
    ratios: dict[DeviceId, float] = field(default_factory=dict)
    held: dict[DeviceId, Held] = field(default_factory=dict)
    collaboration: Collaboration | None = None


@dataclass(frozen=True)
class ClientState:
    """Device state between its rounds.

    Attributes:
        weights: the whole model after local training, shape (spec.size,).
        critical: m_i, shape (spec.size,).
        number: round of both; 0 before the first training.
    """

    weights: FlatArray
    critical: MaskArray
    number: int = 0


@dataclass(frozen=True)
class Task:
    """Start of a device's local training.

    Attributes:
        number: t of this round.
        holds: round of the device's latest update at the coordinator; 0 if there is none.
        ratio: an upper bound of tau.
        patch: entries of the device's next model that it cannot know.
    """

    number: Number
    holds: Number
    ratio: Ratio
    patch: Patch


@dataclass(frozen=True)
class Update:
    """The critical entries, and the number of training samples (for `weighted`)."""

    patch: Patch
    num_samples: NumSamples
