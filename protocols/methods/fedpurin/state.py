"""What FedPURIN's two sides know between rounds, and what travels between them."""

from dataclasses import dataclass, field

from fleetune.protocols.bounds import Number, NumSamples, Ratio
from fleetune.protocols.method.critical_parameters import Collaboration
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.model.spec import FlatArray, MaskArray
from fleetune.protocols.update.patch import Patch


@dataclass(frozen=True)
class Held:
    """What the coordinator remembers of a device.

    Attributes:
        number: of the round of its latest update.
        critical: m_i, shape (spec.size,).
        collaborated: delta_i at the critical entries, shape (critical.sum(),); None: the device keeps what
            it has there.
    """

    number: int
    critical: MaskArray
    collaborated: FlatArray | None


@dataclass(frozen=True)
class ServerState:
    """What the coordinator knows between rounds.

    Attributes:
        weights: bar, shape (spec.size,); normalisation layers as they were at the start.
        number: t of the round at hand.
        merged: whether `weights` is a bar yet, not the initial model.
        ratios: what each device's budget allows, an upper bound of its tau.
        held: of every device that has sent an update.
        collaboration: how alike the last round's devices were; None: nobody looked.
    """

    weights: FlatArray
    number: int = 0
    merged: bool = False
    ratios: dict[DeviceId, float] = field(default_factory=dict)
    held: dict[DeviceId, Held] = field(default_factory=dict)
    collaboration: Collaboration | None = None


@dataclass(frozen=True)
class ClientState:
    """What a device knows between its rounds.

    Attributes:
        weights: the whole model after local training, shape (spec.size,).
        critical: m_i, shape (spec.size,).
        number: of the round both are from; 0: none yet.
    """

    weights: FlatArray
    critical: MaskArray
    number: int = 0


@dataclass(frozen=True)
class Task:
    """What the device trains from.

    Attributes:
        number: t of this round.
        holds: the round of the device's latest update at the coordinator; 0: none.
        ratio: an upper bound of tau.
        patch: the entries of its next model that it cannot know.
    """

    number: Number
    holds: Number
    ratio: Ratio
    patch: Patch


@dataclass(frozen=True)
class Update:
    """The critical entries, and the training samples behind them (for `weighted`)."""

    patch: Patch
    num_samples: NumSamples
