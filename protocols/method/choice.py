"""Ratios with their costs, a device's report about itself, and the budget of a round."""

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

# candidate ratios of a method that defines no others
RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
HELD_BYTES = 4  # an entry, of what tasks have brought, where they are differences to that
MOST_CHOICES = 100
LOCAL_WORKS = (0.25, 0.5, 0.75, 1.0, 2.0, 4.0)  # how much of a round's local training may be proposed
EVALUATION_EPOCHS = 0.36  # a forward pass over the training samples, in epochs (measured)


class RatioCandidate(Struct, frozen=True, array_like=True):
    """A ratio within a device's limits, with the predicted cost of a round at it. None means unknown.

    Attributes:
        ratio: one of the method's ratios (see `Method.choices`).
        round_s: seconds of the round, transfers included.
        bytes_up: payload bytes that the device sends.
        joules: energy that the whole board draws.
        local_s, local_joules: the part of these that local training takes; it scales with local training.
        local_work: largest amount of local training that fits at this ratio.
        uplink: number of the first update encoding of the run to which this applies (`Enrolment.uplinks`).
        values_up: the part of `bytes_up` that the values take in the first encoding; other encodings take
            less.
        values_s, values_joules: seconds and energy for sending these bytes.
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
        """Return the seconds of a round with this share of the local training and of the update's value
        bytes.
        """
        return _less(_less(self.round_s, self.local_s, local_work), self.values_s, values)

    def energy(self, local_work: float, values: float = 1.0) -> float | None:
        """Return the joules of a round with this share of local training and of the update's value bytes."""
        return _less(_less(self.joules, self.local_joules, local_work), self.values_joules, values)

    def sent(self, values: float = 1.0) -> int | None:
        """Return the bytes of an update with this share of its value bytes."""
        num_bytes = _less(self.bytes_up, self.values_up, values)
        return None if num_bytes is None else round(num_bytes)


@dataclass(frozen=True)
class DeviceReport:
    """A device's report about itself when it joins. None means that the device does not know.

    Attributes:
        device: name of the device in the fleet.
        board: firmware profile of the device.
        num_samples: number of its training samples.
        ratio: ratio that the device chose for this run (see `Method.choices`).
        reason: one line on why the device chose this ratio.
        samples_per_s: training speed on the run's model at ratio 1.
        uplink_bps, downlink_bps: bandwidth of its link, in bits a second.
        memory_bytes: memory that a training process may use.
        round_s: predicted seconds of a round at `ratio`, transfers included.
        conditions: conditions of the board at the time of the report.
        new_samples: training samples that arrived since the last training that the device replied with.
            Before the first training, this is all of them. The field is absent if the device does not count
            samples.
        drift: how clearly the data have changed since that training; from 1 on, training pays. The field is
            absent if the device does not test for drift.
        affords: ratios within the device's limits, ascending; sent if the coordinator proposes ratios.
        values: bytes of an update's values in each of the run's encodings (`Enrolment.uplinks`), as a share
            of the bytes in the first one. Sent if the coordinator proposes an encoding.
        idle_w: power of the idle board in watts. Sent if the coordinator proposes ratios and the board's
            profile has it.
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
    """Cost of one round at one ratio for a device.

    Attributes:
        bytes_down, bytes_up: payload bytes of a round, estimated from the number of entries. If a device's
            first round takes more, the method says which round it counts.
        work: training work in each of the run's epochs, relative to full steps on all parameters.
        work_alone: training work if the trainer trains the device's part as a smaller network (see
            `FitPlan.neurons`); None if the method never allows that.
        memory_bytes: memory beyond the model itself, for further models, scores and masks.
        extra_epochs: full epochs in addition to the run's. They include epochs that the method sets itself
            and passes over the training samples for losses or gradients. Evaluations that every method makes
            are not counted.
        trainable_share: share of the model's entries that training changes. The optimiser holds memory for
            these alone; activations and gradients need whole tensors (docs/costs.md).
        bytes_vary: True if rounds send different amounts. The bytes here are then the most that a usual round
            sends. Past rounds may raise this estimate, but never lower it.
        mask_bytes_up: the part of `bytes_up` that says which entries are sent. An encoding of values does not
            reliably reduce it.
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
        """Return the training work of the round in full epochs.

        Args:
            run_epochs: epochs of the run ([training] epochs).
            alone: True if the trainer trains a part as a smaller network.
        """
        work = self.work_alone if alone and self.work_alone is not None else self.work
        return work * run_epochs + self.extra_epochs


@dataclass(frozen=True)
class Choice:
    """Ratio at which the method can run, its cost, and the index of the update's encoding (see `Budget`)."""

    ratio: float
    cost: Cost
    uplink: int = 0

    def sending(self, values: float, uplink: int = 0) -> "Choice":
        """Copy the choice for another encoding, with the share `values` of the value bytes."""
        return replace(self, cost=_encoded(self.cost, values, 1.0, 0), uplink=uplink)


@dataclass(frozen=True)
class Budget:
    """How much a device does in a round.

    Attributes:
        ratio: largest ratio within the device's limits; the method decides what it means.
        local_work: share of the run's local training (see `protocols.method.trainer.num_local_steps`).
        uplink: number of the encoding for the values of the update (see `Enrolment.uplinks`).
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
    """Return `choices` with their costs after encoding: the first of `uplinks` for updates, `down` for tasks.

    The memory suffices for any of `uplinks`. `num_entries` is the size of the model. Masks keep their
    uncompressed size, because how far they compress depends on training (docs/wire.md, Masks). A task's mask
    is assumed to be no larger than the update's.
    """
    raw = find(RAW).cost.bytes_per_value
    shares = uplinks[0].cost.bytes_per_value / raw, down.cost.bytes_per_value / raw
    held = round(max(one.cost.held_bytes for one in uplinks) * num_entries)
    held += 0 if down.name == RAW else HELD_BYTES * num_entries
    return [replace(choice, cost=_encoded(choice.cost, *shares, held)) for choice in choices]


def value_byte_shares(uplinks: Sequence[Encoding]) -> tuple[float, ...]:
    """Return the bytes of the values in each encoding, as a share of the bytes in the first encoding."""
    return tuple(one.cost.bytes_per_value / uplinks[0].cost.bytes_per_value for one in uplinks)


def value_byte_share(report: DeviceReport, budget: Budget) -> float:
    """Return the bytes of an update's values in the budget's encoding, relative to the run's first one."""
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
