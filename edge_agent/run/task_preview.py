"""Reads the header of an encoded task without its values: round, attempt, and the proposed budget."""

from dataclasses import dataclass
from typing import NamedTuple

from msgspec import UNSET, UnsetType

from fleetune.protocols.bounds import FleetName, LocalWork, Number, Positive, Ratio, Uplink
from fleetune.protocols.errors import PacketError
from fleetune.protocols.method.choice import Budget
from fleetune.protocols.model.spec import ModelSpec
from fleetune.protocols.update import codec
from fleetune.protocols.wire.payloads import proposed_budget


class TaskPreview(NamedTuple):
    """The budget and the time that an `Assignment` proposes.

    Attributes:
        budget: ratio, local training and encoding; None if the device chooses.
        span_s: duration allowed for the round, in seconds; None if not known.
    """

    budget: Budget | None = None
    span_s: float | None = None


def preview_task(data: bytes, spec: ModelSpec) -> TaskPreview:
    """The preview of an encoded `Assignment`; an empty one if it cannot be read."""
    try:
        header = read_task_header(data, spec)
    except PacketError:
        return TaskPreview()
    span_s = None if header.span_s is UNSET else header.span_s
    return TaskPreview(proposed_budget(header.ratio, header.local_work, header.uplink), span_s)


def read_task_header(data: bytes, spec: ModelSpec) -> "TaskHeader":
    return codec.decode(data, TaskHeader, spec, limit=codec.payload_limit(spec))


@dataclass(frozen=True)
class TaskHeader:
    """The fields of an `Assignment` without its task."""

    device: FleetName
    round: Number
    attempt: Number
    ratio: Ratio | UnsetType = UNSET
    local_work: LocalWork | UnsetType = UNSET
    span_s: Positive | UnsetType = UNSET
    uplink: Uplink | UnsetType = UNSET
