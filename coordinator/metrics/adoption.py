"""What devices serve after a run with [adoption], of one and of all: how `summary` tells of it."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import UNSET, UnsetType

from fleetune.coordinator.metrics.summary import (
    AdoptionSummary,
    DeviceAdoption,
    DeviceSummary,
    RolloutSummary,
)
from fleetune.coordinator.rounds.records import DeviceRound, RoundRecord
from fleetune.coordinator.rounds.rollout import Rollout
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.student_t import student_t_quantile

CONFIDENCE = 0.95  # that a mean lies above its lower end, and below its upper end


def adoption_of_reply(reply: DeviceRound) -> DeviceAdoption | None:
    """What a device told with a reply; None: nothing of the kind."""
    told = reply.measures
    if told.adopted is UNSET:
        return None
    return DeviceAdoption(told.adopted, _known(told.alone), _known(told.gain), _known(told.gain_error))


def last_told(replies: Iterable[DeviceRound]) -> DeviceAdoption | None:
    """What a device told last, in `replies` in their order; None: nothing of the kind."""
    told = [found for reply in replies if (found := adoption_of_reply(reply)) is not None]
    return told[-1] if told else None


def adoption_of(rows: Iterable[DeviceSummary]) -> AdoptionSummary | None:
    """What all devices told; None: none of them did."""
    return adoption_over([row.adoption for row in rows if row.adoption is not UNSET])


def adoption_so_far(records: Iterable[RoundRecord]) -> AdoptionSummary | None:
    """What each device told last in closed rounds, ascending; None: none of them did."""
    last: dict[DeviceId, DeviceAdoption] = {}
    for record in records:
        for device, reply in record.devices.items():
            if (told := adoption_of_reply(reply)) is not None:
                last[device] = told
    return adoption_over([last[device] for device in sorted(last)])


def adoption_over(told: Sequence[DeviceAdoption]) -> AdoptionSummary | None:
    """What devices told, over all of them; None: none of them did."""
    if not told:
        return None
    low, gain, high = interval([one.gain for one in told if one.gain is not None])
    adopted, below = sum(one.adopted for one in told), sum(one.below for one in told)
    return AdoptionSummary(len(told), adopted, below, gain, low, high)


def rollout_of(rollout: Rollout) -> RolloutSummary:
    """How the shared model's versions stand."""
    return RolloutSummary(
        rollout.approved,
        rollout.trial,
        len(rollout.canaries),
        len(rollout.told),
        rollout.num_approved,
        rollout.num_stopped,
        tuple(one.words for one in rollout.stopped),
    )


def interval(values: list[float]) -> tuple[float | None, float | None, float | None]:
    """The mean of what devices told, and between what the mean over such devices lies: low, mean, high."""
    if not values:
        return None, None, None
    mean = float(np.mean(values))
    if len(values) < 2:
        return None, mean, None
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    reach = student_t_quantile(CONFIDENCE, len(values) - 1) * error
    return mean - reach, mean, mean + reach


def _known(value: float | UnsetType | None) -> float | None:
    return None if value is UNSET else value
