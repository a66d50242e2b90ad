"""What an encoded task says of its turn, and asks for, without its values being read."""

from dataclasses import dataclass
from typing import NamedTuple

from msgspec import UNSET, UnsetType

from fleetune.protocols.bounds import FleetName, LocalWork, Number, Positive, Ratio, Uplink
from fleetune.protocols.errors import PacketError
from fleetune.protocols.method.choice import Budget
from fleetune.protocols.model.spec import ModelSpec
from fleetune.protocols.update import codec
from fleetune.protocols.wire.payloads import proposed_budget


class Asked(NamedTuple):
    """What an `Assignment` asks for beside its task.

    Attributes:
        budget: that it was planned at; None: the device's own choice.
        span_s: seconds that its round is given; None: it does not say.
    """

    budget: Budget | None = None
    span_s: float | None = None


def asked_of(data: bytes, spec: ModelSpec) -> Asked:
    """By an encoded `Assignment`; nothing, where that cannot be read."""
    try:
        turn = read_turn(data, spec)
    except PacketError:
        return Asked()
    span_s = None if turn.span_s is UNSET else turn.span_s
    return Asked(proposed_budget(turn.ratio, turn.local_work, turn.uplink), span_s)


def read_turn(data: bytes, spec: ModelSpec) -> "AssignmentTurn":
    return codec.decode(data, AssignmentTurn, spec, limit=codec.payload_limit(spec))


@dataclass(frozen=True)
class AssignmentTurn:
    """Of an `Assignment`, whose task is passed over."""

    device: FleetName
    round: Number
    attempt: Number
    ratio: Ratio | UnsetType = UNSET
    local_work: LocalWork | UnsetType = UNSET
    span_s: Positive | UnsetType = UNSET
    uplink: Uplink | UnsetType = UNSET
