"""The learning rate over rounds: every device of a run has the same in the same round, whenever it joined."""

import math

from msgspec.structs import replace

from fleetune.protocols.errors import SettingError
from fleetune.protocols.settings.device import TrainingSection


def with_schedule_of_run(training: TrainingSection, rounds: int | None) -> TrainingSection:
    """A [training] section with the `schedule_rounds` that it leaves open.

    Args:
        training: of a run that begins.
        rounds: of the run; None: it has no end.

    Raises:
        SettingError: there is none to take it from.
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
    """A [training] section to go on with in a run that has `begun` with another: what it leaves open, and
    the run decided when it began, stays.
    """
    if training.schedule_rounds is None and training.schedule == begun.schedule:
        return replace(training, schedule_rounds=begun.schedule_rounds)
    return training


def in_round(training: TrainingSection, number: int) -> TrainingSection:
    """A [training] section with the learning rate of a round.

    Args:
        training: of a run that has begun.
        number: of the round, from 1. A final evaluation has that of the round after the last.
    """
    factor = rate_factor(training, number)
    return training if factor == 1 else replace(training, learning_rate=factor * training.learning_rate)


def rate_factor(training: TrainingSection, number: int) -> float:
    """What the learning rate is multiplied with in a round, above 0.

    With W warm-up rounds round t <= W has t / (W + 1). Those after it have, with i = t - W - 1 and N =
    schedule_rounds, less W for cosine: step: schedule_factor^floor(i / N), as torch's StepLR; cosine:
    floor + (1 - floor) * (1 + cos(pi * min(i, N - 1) / N)) / 2, as torch's CosineAnnealingLR, which comes
    up again after N rounds: here it stays where it is in the last of them.
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
"""A learning rate is never 0, however many steps it went down."""
