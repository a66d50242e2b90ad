"""Jobs that workers do for simulated devices, and their results."""

from dataclasses import dataclass, replace
from typing import Self

from fleetune.edge_agent.stream.sample_stream import DataStatistics
from fleetune.protocols.method.choice import Budget
from fleetune.protocols.update.masks.coding_time import CodingTime
from fleetune.protocols.update.once import Told
from fleetune.protocols.wire.messages import TransferKey


@dataclass(frozen=True)
class TrainingJob:
    """One device's work on one task.

    Attributes:
        name: name of the device.
        index: its number.
        budget: for this work.
        key: key of the task.
        payload: the encoded task.
        wall_s: time of day when the task was sent, seconds since 1970.
        num_closed: rounds that had ended. The device's files are kept for a run that goes on from there;
            None: they are not.
        near: the worker is on this machine, and both sides pass on what they encoded.
        told: what the payload holds; None: the device decodes it.
        mask_time: see `Session.reply`.
    """

    name: str
    index: int
    budget: Budget
    key: TransferKey
    payload: bytes
    wall_s: float
    num_closed: int | None = None
    near: bool = False
    told: Told | None = None
    mask_time: CodingTime | None = None

    @property
    def for_elsewhere(self) -> Self:
        """The job for another machine: sending the values takes longer than decoding the payload."""
        return replace(self, near=False, told=None)


@dataclass(frozen=True)
class ArrivalJob:
    """New samples for one device whose data grow.

    Attributes:
        name, index, wall_s, num_closed: see `TrainingJob`.
        delivery: from 0.
    """

    name: str
    index: int
    delivery: int
    wall_s: float
    num_closed: int | None


@dataclass(frozen=True)
class TrainingResult:
    """What a device's work led to.

    Attributes:
        reply: encoded; None: the device declined, or cannot read its task; then `declined` is empty.
        figures: that it reports of its data, where they grow.
        held: its training samples in that round, where they grow.
        declined: the reason, in one line.
        base: digest of the model that it holds, where tasks are differences to it.
        left_out: see `RoundCost`.
        sent: what the reply holds; None: its reader decodes it.
    """

    reply: bytes | None
    figures: DataStatistics | None = None
    held: int = 0
    declined: str = ""
    base: str | None = None
    left_out: float | None = None
    sent: Told | None = None
