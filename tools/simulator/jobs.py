"""What a worker process is given to do for a device, and what comes of it."""

from dataclasses import dataclass, replace
from typing import Self

from fleetune.edge_agent.stream.sample_stream import Figures
from fleetune.protocols.method.choice import Budget
from fleetune.protocols.update.masks.coding_time import CodingTime
from fleetune.protocols.update.once import Told
from fleetune.protocols.wire.messages import TransferKey


@dataclass(frozen=True)
class TrainingJob:
    """One device's work on one assignment.

    Attributes:
        name: of the device.
        index: its number.
        budget: that it runs within.
        key: of the assignment.
        payload: the assignment, encoded.
        wall_s: the time of day when it was sent, seconds since 1970.
        closed: how many rounds had ended: the device's files as they are now are kept for those who go on
            from there; None: nobody does.
        near: its worker is on this machine, and both tell each other what they wrote.
        told: what the payload says; None: the device reads it.
        mask_time: see `Session.reply`.
    """

    name: str
    index: int
    budget: Budget
    key: TransferKey
    payload: bytes
    wall_s: float
    closed: int | None = None
    near: bool = False
    told: Told | None = None
    mask_time: CodingTime | None = None

    @property
    def for_elsewhere(self) -> Self:
        """For a worker on another machine: a network takes longer for values than reading a payload."""
        return replace(self, near=False, told=None)


@dataclass(frozen=True)
class ArrivalJob:
    """What comes to a device whose data grow, in a turn.

    Attributes:
        name, index, wall_s, closed: see `TrainingJob`.
        turn: from 0.
    """

    name: str
    index: int
    turn: int
    wall_s: float
    closed: int | None


@dataclass(frozen=True)
class TrainingResult:
    """What came of it.

    Attributes:
        reply: encoded; None: the device declined, or cannot read its task, and then nothing is `declined`.
        figures: what it tells of its data, where they grow.
        held: training samples of the round, there.
        declined: why, in one line.
        base: digest of what the device holds of the model, where tasks are differences to that.
        left_out: see `RoundCost`.
        sent: what the reply says; None: its reader reads it.
    """

    reply: bytes | None
    figures: Figures | None = None
    held: int = 0
    declined: str = ""
    base: str | None = None
    left_out: float | None = None
    sent: Told | None = None
