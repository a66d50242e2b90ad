"""What a round may ask of a device: what it says of itself, ratios with their costs, and what it allows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from fleetune.protocols.bounds import (
    Amount,
    FleetName,
    LocalWork,
    NumBytes,
    NumSamples,
    Ratio,
    Uplink,
    Watts,
    Words,
)
from fleetune.protocols.conditions import UNKNOWN, Conditions
from fleetune.protocols.update.codec import FRAME_BYTES
from fleetune.protocols.update.encodings import RAW, find
from fleetune.protocols.update.encodings.encoding import Encoding

RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # to choose from, unless a method says otherwise
HELD_BYTES = 4  # an entry, of what tasks have brought, where they are differences to that
MOST_CHOICES = 100
LOCAL_WORKS = (0.25, 0.5, 0.75, 1.0, 2.0, 4.0)  # how much of a round's local training may be proposed
EVALUATION_EPOCHS = 0.36  # a forward pass over the training samples, in epochs (measured)


class RatioCandidate(Struct, frozen=True, array_like=True):
    """A ratio that fits a device's limits, and what a round at it would take; None: not known.

    Attributes:
        ratio: one of the method's (see `Method.choices`).
        round_s: seconds, transfers included.
        bytes_up: of payloads.
        joules: drawn by the whole board.
        local_s, local_joules: of these, what local training takes; a share of it takes that share.
        local_work: how much local training fits at this ratio.
        uplink: with the first of the run's encodings of updates of which that is so (`Enrolment.uplinks`).
        values_up: of these bytes, with the first one, an update's values; another takes fewer of them.
        values_s, values_joules: likewise, what sending these takes.
    """

    ratio: Ratio
    round_s: Amount | None = None
    bytes_up: NumBytes | None = None
    joules: Amount | None = None
    local_s: Amount | None = None
    local_joules: Amount | None = None
    local_work: LocalWork = 1.0
    uplink: Uplink = 0
    values_up: NumBytes | None = None
    values_s: Amount | None = None
    values_joules: Amount | None = None

    def seconds(self, local_work: float, values: float = 1.0) -> float | None:
        """Of a round with this share of the local training, and of the bytes of its update's values."""
        return _less(_less(self.round_s, self.local_s, local_work), self.values_s, values)

    def energy(self, local_work: float, values: float = 1.0) -> float | None:
        """Joules of such a round."""
        return _less(_less(self.joules, self.local_joules, local_work), self.values_joules, values)

    def sent(self, values: float = 1.0) -> int | None:
        """Bytes of such a round's update."""
        num_bytes = _less(self.bytes_up, self.values_up, values)
        return None if num_bytes is None else round(num_bytes)


@dataclass(frozen=True)
class DeviceReport:
    """What a device says about itself when it joins. None: it does not know.

    Attributes:
        device: its name in the fleet.
        board: the firmware profile it goes by.
        num_samples: training samples it holds.
        ratio: the ratio it chose for this run (see `Method.choices`).
        reason: why that ratio, in one line.
        samples_per_s: training speed on the fleet's model at ratio 1.
        uplink_bps, downlink_bps: its link, bits a second.
        memory_bytes: what a training process may take.
        round_s: what it expects a round at `ratio` to take, transfers included.
        conditions: how its board was when it reported.
        new_samples: training samples that came since the training that it replied with last (all of them
            before the first); it does not travel where nothing is counted.
        drift: how clearly its data have changed since then: 1 and more says that training would pay; it does
            not travel where nothing is tested.
        affords: the ratios that fit its limits, ascending; it travels where the coordinator proposes ratios.
        values: the bytes that an update's values take in each of the run's encodings (`Enrolment.uplinks`),
            as a share of those in the first; it travels where the coordinator proposes one.
        idle_w: what its board draws doing nothing; it travels where the coordinator proposes ratios, and the
            board's profile says it.
    """

    device: FleetName
    board: Words = "generic"
    num_samples: NumSamples = 0
    ratio: Ratio = 1.0
    reason: Words = ""
    samples_per_s: Amount | None = None
    uplink_bps: Amount | None = None
    downlink_bps: Amount | None = None
    memory_bytes: NumBytes | None = None
    round_s: Amount | None = None
    conditions: Conditions = UNKNOWN
    new_samples: NumSamples | UnsetType = UNSET
    drift: Amount | UnsetType = UNSET
    affords: Annotated[tuple[RatioCandidate, ...], Meta(max_length=MOST_CHOICES)] | UnsetType = UNSET
    values: Annotated[tuple[Ratio, ...], Meta(min_length=1, max_length=9)] | UnsetType = UNSET
    idle_w: Watts | UnsetType = UNSET


@dataclass(frozen=True)
class Cost:
    """What one round at one ratio asks of a device.

    Attributes:
        bytes_down, bytes_up: payload bytes of a round, estimated from the entries sent. Where a device's
            first round takes more, the method says which it counts.
        work: training work in each of the run's epochs, relative to full steps on every parameter.
        work_alone: instead, where the trainer trains the device's part as a network by itself (see
            `FitPlan.neurons`); None: that is never so.
        memory_bytes: extra memory beyond the model's own: further models, scores, masks.
        extra_epochs: full epochs beside the run's: those that a method sets itself, and passes over the
            training samples for losses or gradients. The evaluations of every method are not counted.
        trainable_share: of the model's entries, those that change in training; the optimiser holds memory
            for them alone. Its activations and gradients go by whole tensors (docs/costs.md).
        bytes_vary: rounds send more or less, and `bytes_down` and `bytes_up` are the most that a usual one
            does: past rounds may show that it is more, but light ones do not promise a light one.
        mask_bytes_up: of `bytes_up`, those that say which entries are sent: an encoding of values does not
            make them fewer for certain.
    """

    bytes_down: int
    bytes_up: int
    work: float = 1.0
    memory_bytes: int = 0
    extra_epochs: float = 0.0
    trainable_share: float = 1.0
    bytes_vary: bool = False
    mask_bytes_up: int = 0
    work_alone: float | None = None

    def epochs(self, run_epochs: float, *, alone: bool = False) -> float:
        """The round's training work in full epochs, where the run has `run_epochs` ([training] epochs).

        alone: whether the trainer trains parts as networks by themselves.
        """
        work = self.work_alone if alone and self.work_alone is not None else self.work
        return work * run_epochs + self.extra_epochs


@dataclass(frozen=True)
class Choice:
    """One ratio a method could run at, its cost, and the number of the encoding that its update's values have
    there (see `Budget`).
    """

    ratio: float
    cost: Cost
    uplink: int = 0

    def sending(self, values: float, uplink: int = 0) -> "Choice":
        """With this share of the bytes of the update's values, by this encoding."""
        return replace(self, cost=_encoded(self.cost, values, 1.0, 0), uplink=uplink)


@dataclass(frozen=True)
class Budget:
    """How much a device does in a round.

    Attributes:
        ratio: the largest that fits its limits; what a method does with it is its own affair.
        local_work: the share of the run's local training, see `protocols.method.trainer.num_local_steps`.
        uplink: which of the run's encodings writes the values of its update, see `Enrolment.uplinks`.
    """

    ratio: float = 1.0
    local_work: float = 1.0
    uplink: int = 0


def _less(whole: float | None, of_part: float | None, share: float) -> float | None:
    if whole is None or of_part is None:
        return whole
    return max(0.0, whole - (1 - share) * of_part)


def with_encodings(
    choices: Sequence[Choice], uplinks: Sequence[Encoding], down: Encoding, num_entries: int
) -> list[Choice]:
    """`choices` as they cost where the first of `uplinks` writes updates and `down` tasks of a model of so
    many entries; there is memory for any of `uplinks`.

    A mask is counted as ever: it may become far smaller (docs/wire.md, Masks), but by how much training
    decides. A task's is taken to be no larger than the update's.
    """
    raw = find(RAW).cost.bytes_per_value
    shares = uplinks[0].cost.bytes_per_value / raw, down.cost.bytes_per_value / raw
    held = round(max(one.cost.held_bytes for one in uplinks) * num_entries)
    held += 0 if down.name == RAW else HELD_BYTES * num_entries
    return [replace(choice, cost=_encoded(choice.cost, *shares, held)) for choice in choices]


def value_byte_shares(uplinks: Sequence[Encoding]) -> tuple[float, ...]:
    """The bytes that values take in each of these, as a share of those in the first."""
    return tuple(one.cost.bytes_per_value / uplinks[0].cost.bytes_per_value for one in uplinks)


def value_byte_share(report: DeviceReport, budget: Budget) -> float:
    """The bytes that an update's values take, as a share of those by the first of the run's encodings."""
    values = (1.0,) if report.values is UNSET else report.values
    return values[min(budget.uplink, len(values) - 1)]


def _encoded(cost: Cost, share_up: float, share_down: float, held: int) -> Cost:
    def scaled(num_bytes: int, share: float) -> int:
        beside = min(FRAME_BYTES + cost.mask_bytes_up, num_bytes)
        return beside + round((num_bytes - beside) * share)

    return replace(
        cost,
        bytes_up=scaled(cost.bytes_up, share_up),
        bytes_down=scaled(cost.bytes_down, share_down),
        memory_bytes=cost.memory_bytes + held,
    )
