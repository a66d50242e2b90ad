"""The default utility of a device's round (`Method.utility`), fitted to measurements made before any run."""

from fleetune.protocols.method.choice import Budget

# the ratio with half of the largest utility, from FedSPU's rounds to 60 % accuracy (docs/ratios.md)
_HALF = 0.25
_BEYOND = 0.7  # exponent of local training beyond the run's epochs, from the same measurements


def default_utility(budget: Budget) -> float:
    """Return the utility of a round within `budget`, as measured with FedSPU; below 1 at the run's epochs.

    Rounds to an accuracy were more than 110 at a ratio of 0.1, then 49, 38 and 25 at 0.2, 0.3 and 0.4. A
    small ratio thus has less utility than its share, and a large one hardly more than one half as large.
    Utility is proportional to local training up to the run's epochs and grows more slowly beyond. Half, one,
    two and four times the epochs took 47, 25, 15 and 10 rounds (p = 0.4, equal devices, one seed).
    """
    share = budget.ratio**2 / (budget.ratio**2 + _HALF**2)
    return share * training_utility(budget.local_work, _BEYOND)


def training_utility(local_work: float, beyond: float) -> float:
    """Return the utility of a multiple of the run's local training; a multiple above 1 counts to the power
    `beyond`.
    """
    return local_work if local_work <= 1 else local_work**beyond
