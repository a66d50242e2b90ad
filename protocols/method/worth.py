"""What a round within a budget is worth to a run, before anything is known of that run (`Method.worth`)."""

from fleetune.protocols.method.choice import Budget

_HALF = 0.25  # the ratio of half the work that could be; measured: rounds to 60 %, FedSPU (docs/ratios.md)
_BEYOND = 0.7  # more local training than once is worth as much, to this power; measured there, too


def usual_worth(budget: Budget) -> float:
    """Below 1 with the run's local training; as measured with FedSPU.

    Rounds that it took to an accuracy: 49, 38 and 25 at 0.2, 0.3 and 0.4, and more than 110 at 0.1. So a
    small ratio brings less than its share, and a large one little more than one half as large. Of the local
    training each step counts alike up to the run's epochs, and less beyond: with half, twice and four times
    as many it took 47, 15 and 10 rounds instead of 25 (p = 0.4, all devices alike, one seed).
    """
    share = budget.ratio**2 / (budget.ratio**2 + _HALF**2)
    return share * worth_of_training(budget.local_work, _BEYOND)


def worth_of_training(local_work: float, beyond: float) -> float:
    """Of so much of the run's local training; what goes beyond once, to the power `beyond`."""
    return local_work if local_work <= 1 else local_work**beyond
