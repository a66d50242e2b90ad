"""How much longer than expected a round may well take: learned from how much longer past ones took.

A device notes of each round how its transfers and its work compare with what was expected of them. What a
choice would take with the luck of each of these rounds is a sample; the time that all but a share `late` of
samples are within must fit the deadline (`late_within`).

- A round that was given up before its reply had arrived took at least so long: it counts as a right-censored
  observation, by Kaplan and Meier (1958). To leave such rounds out, or to take them for finished, would
  teach that rounds are short.
- What few rounds cannot tell a prior says: `PRIOR_ROUNDS` rounds whose seconds are log-normal around what
  was expected, with a standard deviation of `PRIOR_SPREAD`.
- More resources never make a round take longer with its margin: each sample shrinks with every part of the
  forecast, and what share of rounds is like it does not depend on the forecast.
"""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from statistics import NormalDist

from msgspec import Struct
from msgspec.structs import replace

from fleetune.protocols.round_cost import RoundCost

ROUNDS = 64  # remembered
PRIOR_ROUNDS = 4.0
PRIOR_SPREAD = 0.2  # of the logarithm
_PRIOR_POINTS = 20
MOST_FACTOR = 100.0  # of what was expected; more is no noise
_NORMAL = NormalDist(0.0, PRIOR_SPREAD)
PRIOR = tuple(math.exp(_NORMAL.inv_cdf((i + 0.5) / _PRIOR_POINTS)) for i in range(_PRIOR_POINTS))
BEYOND = PRIOR[-2]  # past the longest round of those that were given up: one can only guess


class RoundError(Struct, frozen=True, array_like=True):
    """What one round took, as factors of what was expected of it.

    Attributes:
        total: of all of it.
        transfers: download and upload together.
        work: training and evaluations.
        given_up: before its reply had arrived: it would have taken longer.
    """

    total: float
    transfers: float
    work: float
    given_up: bool = False

    def longer(self, other: "RoundError") -> "RoundError":
        """Of two rounds that were given up, what is known of a third that took as long as either."""
        transfers, work = max(self.transfers, other.transfers), max(self.work, other.work)
        return RoundError(max(self.total, other.total), transfers, work, given_up=True)


def error_of(expected: RoundCost, actual: RoundCost) -> RoundError | None:
    """Of a round that was done to its end; None: one of the two is not known."""
    if expected.round_s is None or actual.round_s is None:
        return None
    assert expected.train_s is not None
    assert actual.train_s is not None
    return RoundError(
        _factor(actual.round_s, expected.round_s),
        _factor(actual.round_s - actual.train_s, expected.round_s - expected.train_s),
        _factor(actual.train_s, expected.train_s),
    )


def error_of_given_up(expected: RoundCost, begun: RoundCost, elapsed_s: float) -> RoundError | None:
    """Of a round that took `elapsed_s` at least; None: it is not known what was expected.

    Args:
        expected: of the round.
        begun: what it took of parts that came to an end.
        elapsed_s: from the start of its download on.
    """
    if expected.round_s is None or expected.train_s is None:
        return None
    download_s = begun.download_s or 0.0
    if begun.train_s is None:
        work_s, transfers_s = max(0.0, elapsed_s - download_s), min(download_s, elapsed_s)
    else:
        work_s, transfers_s = begun.train_s, max(download_s, elapsed_s - begun.train_s)
    return RoundError(
        _factor(elapsed_s, expected.round_s),
        _factor(transfers_s, expected.round_s - expected.train_s),
        _factor(work_s, expected.train_s),
        given_up=True,
    )


def over_before_its_end(expected: RoundCost, begun: RoundCost, elapsed_s: float) -> RoundCost:
    """What a round that was given up after `elapsed_s` shows of its parts: those that came to an end, and of
    the one that was under way that it took longer than expected, where it did.

    That is no less than what it had taken by then, which may stand for it in a median: it is above it anyhow.
    """
    download_s = begun.download_s or 0.0
    if begun.train_s is None:
        return replace(begun, train_s=_beyond(expected.train_s, elapsed_s - download_s))
    return replace(begun, upload_s=_beyond(expected.upload_s, elapsed_s - download_s - begun.train_s))


def _beyond(expected_s: float | None, elapsed_s: float) -> float | None:
    return elapsed_s if expected_s is not None and elapsed_s > expected_s else None


def late_within(expected: RoundCost, errors: Sequence[RoundError], late: float) -> float:
    """Seconds that a round takes at most, but for a share `late` of rounds; never less than is expected.

    Args:
        expected: of the round; parts that are not known count as nothing.
        errors: of past rounds.
        late: in (0, 1].
    """
    work_s = expected.train_s or 0.0
    transfers_s = expected.known_s - work_s
    shares = _shares(tuple(errors))
    samples = [(transfers_s * one.transfers + work_s * one.work, share) for one, share in shares]
    left = max(0.0, 1.0 - sum(share for _, share in shares))
    samples.append((BEYOND * max(seconds for seconds, _ in samples), left))
    return max(expected.known_s, _quantile(samples, late))


@lru_cache(maxsize=4)  # a choice among ratios asks about the same rounds again
def _shares(errors: tuple[RoundError, ...]) -> list[tuple[RoundError, float]]:
    """What share of rounds is like each of those that were done (the product-limit estimate), the prior's
    among them; the rest is longer than all of them. One that was given up has none of its own: it would have
    been like those that went beyond more.

    By `total`, so that the shares are the same for every choice.
    """
    weighted = [(RoundError(one, one, one), PRIOR_ROUNDS / len(PRIOR)) for one in PRIOR]
    weighted += [(one, 1.0) for one in errors]
    weighted.sort(key=lambda one: (one[0].total, one[0].given_up))
    at_risk, left, shares = sum(weight for _, weight in weighted), 1.0, []
    for error, weight in weighted:
        share = 0.0 if error.given_up else left * min(1.0, weight / at_risk)
        shares.append((error, share))
        at_risk, left = at_risk - weight, left - share
    return shares


def _quantile(samples: Iterable[tuple[float, float]], above: float) -> float:
    """The least seconds that samples of no larger share than `above` go beyond."""
    longer, least_s = 0.0, math.inf
    for seconds, share in sorted(samples, reverse=True):
        if longer > above + 1e-9:
            break
        longer, least_s = longer + share, seconds
    return least_s


def _factor(actual_s: float, expected_s: float) -> float:
    """Where nothing was expected nothing is told."""
    return min(actual_s / expected_s, MOST_FACTOR) if expected_s > 0 else 1.0
