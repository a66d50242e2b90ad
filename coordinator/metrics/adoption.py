"""Counts which models devices deploy in a run with [adoption], and their gains over local-only training."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import UNSET, UnsetType

from fleetune.coordinator.metrics.metric import gain_of
from fleetune.coordinator.metrics.summary import AdoptionSummary, DeviceAdoption
from fleetune.coordinator.rounds.records import DeviceRound, RoundRecord
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.student_t import student_t_quantile
from fleetune.protocols.tasks.scores import Score

CONFIDENCE = 0.95  # one-sided confidence at each end of the interval


def adoption_of_reply(reply: DeviceRound) -> DeviceAdoption | None:
    """Return what a device reported about adoption with a reply; None if it reported nothing."""
    found = reply.measures
    if found.adopted is UNSET:
        return None
    return DeviceAdoption(found.adopted, _known(found.alone), _known(found.gain), _known(found.gain_error))


def latest_adoption(replies: Iterable[DeviceRound]) -> DeviceAdoption | None:
    """Return the last report about adoption in `replies`, which are in order; None if there is none."""
    reported = [found for reply in replies if (found := adoption_of_reply(reply)) is not None]
    return reported[-1] if reported else None


class LatestAdoption:
    """Each device's latest report about adoption, updated round by round."""

    def __init__(self) -> None:
        self._latest: dict[DeviceId, DeviceAdoption] = {}

    def add(self, record: RoundRecord) -> None:
        """Add a closed round."""
        for device, reply in record.devices.items():
            if (found := adoption_of_reply(reply)) is not None:
                self._latest[device] = found

    def summary(self) -> AdoptionSummary | None:
        """Return the summary over all devices; None if no device reported anything."""
        return adoption_over([self._latest[device] for device in sorted(self._latest)])


def adoption_over(reported: Sequence[DeviceAdoption]) -> AdoptionSummary | None:
    """Return the summary of these reports; None if there are none."""
    if not reported:
        return None
    low, gain, high = interval([one.gain for one in reported if one.gain is not None])
    adopted, below = sum(one.adopted for one in reported), sum(one.below for one in reported)
    return AdoptionSummary(len(reported), adopted, below, gain, low, high)


def interval(values: list[float]) -> tuple[float | None, float | None, float | None]:
    """Return the mean over devices with its confidence interval (one-sided 95 % at each end): low, mean,
    high.
    """
    if not values:
        return None, None, None
    mean = float(np.mean(values))
    if len(values) < 2:
        return None, mean, None
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    reach = student_t_quantile(CONFIDENCE, len(values) - 1) * error
    return mean - reach, mean, mean + reach


def adoption_texts(found: AdoptionSummary, score: Score) -> list[str]:
    """Return the number of devices that deploy a model of the fleet; then, if known, the gain over
    local-only.
    """
    adopted = [f"{found.adopted} of {found.devices}"]
    if found.gain is None:
        return adopted
    unit, points = gain_of(score), " points" if score.share else ""
    span = "" if found.low is None else f" ({unit.text(found.low)} to {unit.text(found.high)})"
    return [*adopted, f"{unit.text(found.gain)}{points} over local-only{span}"]


def _known(value: float | UnsetType | None) -> float | None:
    return None if value is UNSET else value
