"""Safety margin in time: how much longer than predicted a round can take, learned from past rounds.

A device compares the transfers and the work of each round with their forecast. Each past round is a sample
of how long a choice would take with the same errors. The duration that at most a share `late` of the samples
exceeds must fit the deadline (`seconds_with_margin`).

- A round that was cancelled before its reply had arrived would have taken longer. It counts as a
  right-censored observation (Kaplan and Meier 1958). Dropping such rounds, or counting them as complete,
  would underestimate durations.
- A prior of `PRIOR_ROUNDS` rounds helps while few rounds are known. Its seconds are log-normal around the
  forecast, with a standard deviation of `PRIOR_SPREAD`.
- More resources never make a round with its margin longer: each sample shrinks with every part of the
  forecast, and the samples' weights do not depend on the forecast.
"""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from statistics import NormalDist

from msgspec import Struct
from msgspec.structs import replace

from fleetune.protocols.round_cost import RoundCost

ROUNDS = 64  # number of errors that are kept
PRIOR_ROUNDS = 4.0
PRIOR_SPREAD = 0.2  # standard deviation of the logarithm
_PRIOR_POINTS = 20
MOST_FACTOR = 100.0  # largest factor on the forecast; more is not noise
_NORMAL = NormalDist(0.0, PRIOR_SPREAD)
PRIOR = tuple(math.exp(_NORMAL.inv_cdf((i + 0.5) / _PRIOR_POINTS)) for i in range(_PRIOR_POINTS))
BEYOND = PRIOR[-2]  # factor on the longest sample: a guess for cancelled rounds beyond it


class ForecastError(Struct, frozen=True, array_like=True):
    """Ratio of a round's duration to its forecast.

    Attributes:
        total: ratio of the whole round.
        transfers: ratio of download and upload together.
        work: ratio of training and evaluations.
        censored: True if the round was cancelled before its reply had arrived; it would have taken longer.
    """

    total: float
    transfers: float
    work: float
    censored: bool = False

    def longer(self, other: "ForecastError") -> "ForecastError":
        """Return the larger factors of two cancelled rounds."""
        transfers, work = max(self.transfers, other.transfers), max(self.work, other.work)
        return ForecastError(max(self.total, other.total), transfers, work, censored=True)


def forecast_error(predicted: RoundCost, actual: RoundCost) -> ForecastError | None:
    """Return the error of a complete round; None if a part of the round or of its forecast is unknown."""
    if predicted.round_s is None or actual.round_s is None:
        return None
    assert actual.train_s is not None
    return _error(predicted, actual.round_s, actual.round_s - actual.train_s, actual.train_s)


def censored_error(predicted: RoundCost, begun: RoundCost, elapsed_s: float) -> ForecastError | None:
    """Return the error of a cancelled round; None if its forecast is unknown.

    Args:
        predicted: forecast of the round.
        begun: its parts that ended.
        elapsed_s: seconds since its download started.
    """
    if predicted.round_s is None:
        return None
    download_s = begun.download_s or 0.0
    if begun.train_s is None:
        work_s, transfers_s = max(0.0, elapsed_s - download_s), min(download_s, elapsed_s)
    else:
        work_s, transfers_s = begun.train_s, max(download_s, elapsed_s - begun.train_s)
    return _error(predicted, elapsed_s, transfers_s, work_s, censored=True)


def _error(
    predicted: RoundCost, round_s: float, transfers_s: float, work_s: float, *, censored: bool = False
) -> ForecastError:
    assert predicted.round_s is not None
    assert predicted.train_s is not None
    return ForecastError(
        _factor(round_s, predicted.round_s),
        _factor(transfers_s, predicted.round_s - predicted.train_s),
        _factor(work_s, predicted.train_s),
        censored,
    )


def observed_parts(predicted: RoundCost, begun: RoundCost, elapsed_s: float) -> RoundCost:
    """Return the parts of a cancelled round that ended, and the open part if it exceeded its forecast.

    The elapsed time is used for the open part. It is too short, but longer than the median that uses it.
    """
    download_s = begun.download_s or 0.0
    if begun.train_s is None:
        return replace(begun, train_s=_if_longer(predicted.train_s, elapsed_s - download_s))
    return replace(begun, upload_s=_if_longer(predicted.upload_s, elapsed_s - download_s - begun.train_s))


def _if_longer(predicted_s: float | None, elapsed_s: float) -> float | None:
    return elapsed_s if predicted_s is not None and elapsed_s > predicted_s else None


def seconds_with_margin(predicted: RoundCost, errors: Sequence[ForecastError], late: float) -> float:
    """Return the duration that at most a share `late` of rounds exceeds, and at least the forecast.

    Args:
        predicted: forecast of the round. Unknown parts count as 0.
        errors: errors of past rounds.
        late: share in (0, 1].
    """
    work_s = predicted.train_s or 0.0
    transfers_s = predicted.known_s - work_s
    shares = _shares(tuple(errors))
    samples = [(transfers_s * one.transfers + work_s * one.work, share) for one, share in shares]
    left = max(0.0, 1.0 - sum(share for _, share in shares))
    samples.append((BEYOND * max(seconds for seconds, _ in samples), left))
    return max(predicted.known_s, _quantile(samples, late))


@lru_cache(maxsize=4)  # every choice of a decision uses the same rounds
def _shares(errors: tuple[ForecastError, ...]) -> list[tuple[ForecastError, float]]:
    """Return the share of rounds that each sample represents (product-limit estimate), prior samples
    included.

    A censored sample has a share of 0. The shares do not sum to 1, as the rest lies beyond all samples.
    Samples are ordered by `total`, so that the shares are the same for every choice.
    """
    weighted = [(ForecastError(one, one, one), PRIOR_ROUNDS / len(PRIOR)) for one in PRIOR]
    weighted += [(one, 1.0) for one in errors]
    weighted.sort(key=lambda one: (one[0].total, one[0].censored))
    at_risk, left, shares = sum(weight for _, weight in weighted), 1.0, []
    for error, weight in weighted:
        share = 0.0 if error.censored else left * min(1.0, weight / at_risk)
        shares.append((error, share))
        at_risk, left = at_risk - weight, left - share
    return shares


def _quantile(samples: Iterable[tuple[float, float]], above: float) -> float:
    """Return the smallest seconds that samples with a share of at most `above` exceed."""
    longer, least_s = 0.0, math.inf
    for seconds, share in sorted(samples, reverse=True):
        if longer > above + 1e-9:
            break
        longer, least_s = longer + share, seconds
    return least_s


def _factor(actual_s: float, predicted_s: float) -> float:
    return min(actual_s / predicted_s, MOST_FACTOR) if predicted_s > 0 else 1.0
