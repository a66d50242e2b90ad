"""How many devices use what the fleet led them to, and what that is worth to them, in a few words."""

from fleetune.coordinator.metrics.metric import gain_of
from fleetune.coordinator.metrics.summary import AdoptionSummary
from fleetune.protocols.tasks.scores import Score


def adoption_words(found: AdoptionSummary, score: Score) -> list[str]:
    """How many devices of those that tell serve a model of the fleet; and, as far as it is known, the gain
    over alone with its interval.
    """
    served = [f"{found.adopted} of {found.told}"]
    if found.gain is None:
        return served
    unit, points = gain_of(score), " points" if score.share else ""
    span = "" if found.low is None else f" ({unit.text(found.low)} to {unit.text(found.high)})"
    return [*served, f"{unit.text(found.gain)}{points} over alone{span}"]
