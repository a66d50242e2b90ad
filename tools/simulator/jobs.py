"""Jobs of workers for simulated devices, and their results."""

from dataclasses import dataclass, replace
from typing import Self

from fleetune.edge_agent.stream.sample_stream import DataStatistics
from fleetune.protocols.method.choice import Budget
from fleetune.protocols.update.masks.coding_time import CodingTime
from fleetune.protocols.update.shared_payload_cache import PayloadContent
from fleetune.protocols.wire.messages import TransferKey


@dataclass(frozen=True)
class TrainingJob:
    """One device's work on one task, as a worker receives it.

    Attributes:
        name: name of the device.
        index: number of the device.
        budget: budget of the task: ratio, local training and encoding.
        key: key of the task.
        payload: the encoded task.
        wall_s: time of day when the task was sent, seconds since 1970.
        num_closed: number of ended rounds; the device's files are stored so that a resumed run can restore
            that state. None if they are not stored.
        near: True if the worker is on this machine, so that both sides pass decoded values on.
        content: decoded values of the payload; None if the device decodes it.
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
    content: PayloadContent | None = None
    mask_time: CodingTime | None = None

    @property
    def for_elsewhere(self) -> Self:
        """Return the job for another machine, with the payload but without decoded values.

        Sending the values would take longer than decoding the payload there.
        """
        return replace(self, near=False, content=None)


@dataclass(frozen=True)
class ArrivalJob:
    """Delivers new samples to one device whose data grow.

    Attributes:
        name, index, wall_s, num_closed: see `TrainingJob`.
        delivery: number of the delivery, from 0.
    """

    name: str
    index: int
    delivery: int
    wall_s: float
    num_closed: int | None


@dataclass(frozen=True)
class TrainingResult:
    """Result of a device's work.

    Attributes:
        reply: the encoded reply. None if the device declined, or if it cannot decode its task; `declined` is
            then empty.
        figures: statistics of the device's data that it reports, if its data grow.
        held: number of its training samples in that round, if its data grow.
        declined: the reason for declining, in one line.
        base: digest of its model, if tasks are differences to that model.
        compression_error: see `RoundCost`.
        sent: decoded values of the reply; None if the coordinator decodes it.
    """

    reply: bytes | None
    figures: DataStatistics | None = None
    held: int = 0
    declined: str = ""
    base: str | None = None
    compression_error: float | None = None
    sent: PayloadContent | None = None
