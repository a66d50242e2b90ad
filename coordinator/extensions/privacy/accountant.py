"""The epsilon of a device, from the number of tasks that it was asked to do.

Each task is one Gaussian mechanism. Mechanisms of one device compose to a single Gaussian one: k tasks of the
multiplier z are as one of z / sqrt(k). That holds exactly, also if later tasks depend on earlier results.
`dp-accounting` of Google converts it to epsilon (Balle and Wang 2018, theorem 8).

Client selection amplifies nothing here. Every device knows the run's seed, from which participants are drawn,
and availability is no random draw. So each task counts in full for the device that was asked.
"""

import math
from functools import lru_cache

import numpy as np

from fleetune.protocols.errors import SettingError
from fleetune.protocols.settings.privacy import PrivacySection

MOST_TASKS = 2**40  # more than any run has


@lru_cache(maxsize=1000)
def epsilon_of(section: PrivacySection, tasks: int) -> float:
    """Return the epsilon of a device after this number of tasks, at `section.delta`.

    Raises:
        SettingError: dp-accounting is not installed.
    """
    if not tasks:
        return 0.0
    try:
        from dp_accounting import get_epsilon_gaussian
    except ImportError:
        raise SettingError(
            "[privacy] needs dp-accounting, which is not installed; pip install dp-accounting"
        ) from None
    with np.errstate(divide="ignore", over="ignore"):  # its search tries values without a finite logarithm
        return float(get_epsilon_gaussian(section.effective_multiplier / math.sqrt(tasks), section.delta))


def most_tasks(section: PrivacySection) -> int | None:
    """Return the largest number of tasks within `max_epsilon`; None if that is not set.

    Raises:
        SettingError: not even one task is within it, or dp-accounting is not installed.
    """
    limit = section.max_epsilon
    if limit is None:
        return None
    if epsilon_of(section, 1) > limit:
        raise SettingError(
            f"privacy.max_epsilon = {limit:g}: one round already has epsilon {epsilon_of(section, 1):.3g};"
            " raise noise_multiplier or max_epsilon"
        )
    low, high = 1, MOST_TASKS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if epsilon_of(section, middle) <= limit else (low, middle)
    return low
