"""The default utility of a device's round (`Method.utility`): measured beforehand, not during a run."""

from fleetune.protocols.method.choice import Budget

_HALF = 0.25  # the ratio with half of the possible utility: rounds to 60 %, FedSPU (docs/ratios.md)
_BEYOND = 0.7  # exponent of local training beyond the run's epochs; measured likewise


def default_utility(budget: Budget) -> float:
    """Utility as measured with FedSPU; below 1 at the run's epochs.

    Rounds to an accuracy: 49, 38 and 25 at ratios of 0.2, 0.3 and 0.4, more than 110 at 0.1. So a small ratio
    has less utility than its share, and a large one hardly more than one half as large. Each step of local
    training counts alike up to the run's epochs, and less beyond: 47, 25, 15 and 10 rounds with half, once,
    twice and four times as many (p = 0.4, all devices alike, one seed).
    """
    share = budget.ratio**2 / (budget.ratio**2 + _HALF**2)
    return share * training_utility(budget.local_work, _BEYOND)


def training_utility(local_work: float, beyond: float) -> float:
    """Utility of a multiple of the run's local training; above 1 to the power `beyond`."""
    return local_work if local_work <= 1 else local_work**beyond
