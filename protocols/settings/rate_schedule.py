"""Learning-rate schedules over rounds.

The rate depends on the round alone, so a device that joins late uses the same rate as the others.
"""

import math

from msgspec.structs import replace

from fleetune.protocols.errors import SettingError
from fleetune.protocols.settings.device import TrainingSection


def with_schedule_of_run(training: TrainingSection, rounds: int | None) -> TrainingSection:
    """Return the [training] section with `schedule_rounds` filled in if it was left out.

    Args:
        training: section of a run that begins.
        rounds: number of rounds of the run; None: an open run.

    Raises:
        SettingError: the schedule needs `schedule_rounds` and the run is open.
    """
    if training.schedule == "constant" or training.schedule_rounds is not None:
        return training
    if rounds is None:
        raise SettingError(
            f'training.schedule_rounds: {training.schedule} takes it from run.rounds, which is "open":'
            " give it, e.g. 100"
        )
    thirds = 1 if training.schedule == "cosine" else 3
    return replace(training, schedule_rounds=math.ceil(rounds / thirds))


def with_that_of_run(training: TrainingSection, begun: TrainingSection) -> TrainingSection:
    """Return the [training] section for a run that continues with changed settings.

    It keeps the `schedule_rounds` that was computed when the run began, unless the schedule itself changed.

    Args:
        training: the changed section.
        begun: the section that the run began with.
    """
    if training.schedule_rounds is None and training.schedule == begun.schedule:
        return replace(training, schedule_rounds=begun.schedule_rounds)
    return training


def in_round(training: TrainingSection, number: int) -> TrainingSection:
    """Return the [training] section with the learning rate of one round.

    Args:
        training: section of a run that has begun.
        number: the round, from 1. A final evaluation uses the number after the last round.
    """
    factor = rate_factor(training, number)
    return training if factor == 1 else replace(training, learning_rate=factor * training.learning_rate)


def rate_factor(training: TrainingSection, number: int) -> float:
    """Factor on the learning rate in a round, above 0.

    With W warm-up rounds, round t <= W has the factor t / (W + 1). For later rounds let i = t - W - 1, and
    let N be `schedule_rounds` (less W for cosine):

    - step: schedule_factor^floor(i / N), as torch's StepLR;
    - cosine: floor + (1 - floor) * (1 + cos(pi * min(i, N - 1) / N)) / 2, as torch's CosineAnnealingLR.
      Torch's rate rises again after N rounds; here it stays at its last value.

    Args:
        training: section of a run that has begun.
        number: the round, from 1.
    """
    warmup = training.warmup_rounds
    if number <= warmup:
        return number / (warmup + 1)
    since, rounds = number - warmup - 1, training.schedule_rounds or 1
    if training.schedule == "step":
        return max(training.schedule_factor ** (since // rounds), _LEAST)
    if training.schedule == "cosine":
        rounds = max(1, rounds - warmup)
        floor, share = training.schedule_floor, min(since, rounds - 1) / rounds
        return floor + (1 - floor) * (1 + math.cos(math.pi * share)) / 2
    return 1.0


_LEAST = 1e-30
"""Smallest factor: a learning rate of 0 would be an invalid setting, however many steps have passed."""
