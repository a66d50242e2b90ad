"""Computes the target round duration, within which every device must have an option.

A round lasts as long as its slowest participant. The target is the duration with the highest utility per
second. A fleet's utility is the geometric mean over its devices (proportional fairness; Kelly 1997): doubling
the utility of a straggler counts as much as doubling that of a quick device.
"""

from collections.abc import Mapping
from math import log

import numpy as np

from fleetune.coordinator.rounds.proposals.candidate_plans import Plans
from fleetune.protocols.method.method import DeviceId


def within_target_duration(plans: Mapping[DeviceId, Plans], fixed_s: float = 0.0) -> dict[DeviceId, Plans]:
    """Return each device's options within the target duration; at least one for each device.

    `fixed_s`: lower bound of the duration, set by devices that choose their budget themselves.
    """
    target_s = _target_s(list(plans.values()), fixed_s)
    return {device: [one for one in some if one.seconds <= target_s] for device, some in plans.items()}


def _target_s(plans: list[Plans], fixed_s: float) -> float:
    """Return the target duration in seconds; the shortest of equals."""
    if not plans:
        return 0.0
    least_s = max(fixed_s, *(min(one.seconds for one in some) for some in plans))
    steps = np.array([step for some in plans for step in _utility_steps(some)])
    steps = steps[np.argsort(steps[:, 0], kind="stable")]
    durations_s, log_utility = np.maximum(steps[:, 0], least_s), np.cumsum(steps[:, 1])
    # of steps at equal durations, only after the last is the sum complete
    last = np.append(durations_s[1:] > durations_s[:-1], True)
    durations_s, log_utility = durations_s[last], log_utility[last]
    if durations_s[0] <= 0:  # no device reports a duration
        return float(durations_s[-1])
    return float(durations_s[np.argmax(log_utility / len(plans) - np.log(durations_s))])


def _utility_steps(plans: Plans) -> list[tuple[float, float]]:
    """Return pairs (seconds, gain): from this duration on, the device's log utility is larger by the gain."""
    steps: list[tuple[float, float]] = []
    most = 1.0
    for one in sorted(plans, key=lambda one: (one.seconds, -one.utility)):
        if not steps or one.utility > most:
            steps.append((one.seconds, log(one.utility / most)))
            most = one.utility
    return steps
