"""The largest share that one update may have in a round's mean (`round.max_share`)."""

from collections.abc import Mapping
from fractions import Fraction

from fleetune.protocols.method.method import DeviceId

MAX_SHARE = 0.3
"""What `round.max_share` is where run.toml leaves it out."""


def samples_cut(claimed: Mapping[DeviceId, int], max_share: float) -> dict[DeviceId, int]:
    """The updates whose weight is cut, each with the samples that it counts as instead.

    Of n updates with samples, one may have the share max(`max_share`, 2 / n) of all samples. What is above
    that is spread over the others in proportion to their samples (water-filling): the others keep their
    weights, and each cut update gets the largest weight whose share is within the limit. A share is one of
    the whole round's samples, also where each entry of a model has a mean of its own.

    Args:
        claimed: the training samples behind each update of a round.
        max_share: in (0, 1]; 1: no limit.
    """
    counted = sorted((samples for samples in claimed.values() if samples > 0), reverse=True)
    if not counted:
        return {}
    limit = max(Fraction(str(max_share)), Fraction(2, len(counted)))  # exact: all machines cut alike
    if limit >= 1:
        return {}
    rest = sum(counted)
    for num_cut, samples in enumerate(counted):
        most = limit * rest / (1 - num_cut * limit)  # with the first `num_cut` at the limit
        if samples <= most:
            break
        rest -= samples
    return {device: int(most) for device, samples in claimed.items() if samples > most}
