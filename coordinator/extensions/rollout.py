"""Roll-out of new versions of the shared model: to canaries first, then to all devices or to none.

A version is the shared model after a round. One version at a time is on trial. Its canaries, drawn with the
run's key, deploy it; the other devices keep the version approved before. Each canary compares the two on its
own held-out samples, by the same paired difference as the gate of [adoption]. After `watch` the version is
judged: it is rolled out to all devices, or its roll-out is stopped. Then the current shared model goes on
trial.

**The judgement** counts canaries, not amounts. A version is worse if more than half of the reporting canaries
each show a significant loss. The confidence of these tests is chosen so that a version that is no worse is
stopped in at most 1 - `regression` of roll-outs. With one canary its own test decides; with many, a bare
majority of means. So a canary that reports false numbers has one vote, and fewer than half of the canaries
decide nothing. A device without held-out samples has no vote.

All of this is a function of the reports: the result is the same in a simulation and after any restart.
"""

import math
from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.adoption import AdoptionSection
from fleetune.protocols.settings.schedule import seconds_of_span
from fleetune.protocols.student_t import student_t_quantile
from fleetune.protocols.wire.release import Comparison

MOST_STOPPED = 20  # number of stopped versions that are remembered
_STEPS = 60  # bisection steps: down to the last bit of a double


class Stopped(Struct, frozen=True):
    """A version whose roll-out was stopped; no device deploys it.

    Attributes:
        version: its number.
        round: the round after which it was stopped.
        worse: number of canaries with a significant loss.
        reporting: number of canaries that reported.
    """

    version: int
    round: int
    worse: int
    reporting: int

    @property
    def words(self) -> str:
        """Return the stopped version in one line."""
        return (
            f"version {self.version} stopped after round {self.round}: worse on {self.worse} of"
            f" {self.reporting} canaries"
        )


class Rollout(Struct, frozen=True, omit_defaults=True):
    """The versions of a run's shared model.

    Attributes:
        approved: the newest version that is rolled out to all; 0: the initial model.
        trial: the version on trial; 0: none.
        canaries: devices that deploy it, ascending.
        draw: how often canaries were drawn for it.
        since_round, since_s: round and run time at which they were drawn last.
        reporting: the latest comparison that each canary reported.
        stopped: the latest versions that were found to be worse.
        num_stopped, num_approved: counts over the whole run.
    """

    approved: int = 0
    trial: int = 0
    canaries: tuple[DeviceId, ...] = ()
    draw: int = 0
    since_round: int = 0
    since_s: float = 0.0
    reporting: dict[DeviceId, Comparison] = {}
    stopped: tuple[Stopped, ...] = ()
    num_stopped: int = 0
    num_approved: int = 0

    @property
    def words(self) -> str:
        """Return the state of the roll-out in one line."""
        said = [f"version {self.approved} is out" if self.approved else "none is out yet"]
        if self.trial:
            reporting = f"{len(self.reporting)} of {len(self.canaries)} canaries reported"
            said.append(f"{self.trial} on trial since round {self.since_round}, {reporting}")
        if self.stopped:
            said.append(self.stopped[-1].words)
        return "; ".join(said)

    @property
    def short(self) -> str:
        """Return the approved version and the version on trial, in a few words."""
        out = f"{self.approved} is out" if self.approved else "none is out yet"
        return f"{out}, {self.trial} on trial" if self.trial else out


def heard(rollout: Rollout, device: DeviceId, found: Comparison) -> Rollout:
    """Return the roll-out with a device's comparison.

    Unless it is a canary's on this trial, it is ignored.
    """
    if device not in rollout.canaries or (found.new, found.old) != (rollout.trial, rollout.approved):
        return rollout
    return replace(rollout, reporting={**rollout.reporting, device: found})


def after_round(
    rollout: Rollout, number: int, now: float, devices: Sequence[DeviceId], rule: AdoptionSection, key: Key
) -> tuple[Rollout, str]:
    """Return the roll-out after a round has closed, and a message for the log if anything was decided.

    Args:
        rollout: with all comparisons of this round (`heard`).
        number: number of the round; the shared model after it becomes a version, if one is due.
        now: on the run's clock, seconds.
        devices: possible canaries, ascending.
        rule: the run's section [adoption].
        key: key of the run's draws of canaries.
    """
    line = ""
    if rollout.trial:
        overdue = _stood(rollout, number, now, rule)
        reporting = len(rollout.reporting)
        if not overdue or (2 * reporting < len(rollout.canaries) and overdue < 2):
            return rollout, ""
        if not reporting:
            return _drawn(rollout, number, now, devices, rule, key), (
                f"version {rollout.trial}: none of its canaries reported; others are drawn"
            )
        rollout, line = _judged(rollout, number, rule.regression)
    fresh = replace(rollout, trial=number, draw=0, reporting={})
    return _drawn(fresh, number, now, devices, rule, key), line


def rolled_back(rollout: Rollout, number: int) -> Rollout:
    """Return the roll-out after a closed round was rolled back: the shared model after it is no version."""
    if rollout.trial != number:
        return rollout
    return replace(rollout, trial=0, canaries=(), reporting={}, draw=0)


def worse_canaries(reporting: Mapping[DeviceId, Comparison], regression: float) -> tuple[int, bool]:
    """Return the number of canaries with a significant loss, and True if that stops the roll-out."""
    least = len(reporting) // 2 + 1
    confidence = 1.0 - chance_of_each(len(reporting), least, 1.0 - regression)
    worse = sum(_loses(found, confidence) for found in reporting.values())
    return worse, worse >= least


def chance_of_each(count: int, least: int, chance: float) -> float:
    """Return the probability of one event at which at least `least` of `count` events occur with `chance`."""
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        each = (low + high) / 2
        if _at_least(count, least, each) > chance:
            high = each
        else:
            low = each
    return min(low, 0.5)


def _at_least(count: int, least: int, each: float) -> float:
    terms = (math.comb(count, k) * each**k * (1 - each) ** (count - k) for k in range(least, count + 1))
    return math.fsum(terms)


def _loses(found: Comparison, confidence: float) -> bool:
    if found.by_samples < 2 or found.gain >= 0:
        return False
    return -found.gain > student_t_quantile(confidence, found.by_samples - 1) * found.error


def _judged(rollout: Rollout, number: int, regression: float) -> tuple[Rollout, str]:
    worse, stops = worse_canaries(rollout.reporting, regression)
    if not stops:
        line = (
            f"version {rollout.trial} goes out to all: worse on {worse} of {len(rollout.reporting)} canaries"
        )
        return replace(rollout, approved=rollout.trial, num_approved=rollout.num_approved + 1), line
    one = Stopped(rollout.trial, number, worse, len(rollout.reporting))
    stopped = (*rollout.stopped, one)[-MOST_STOPPED:]
    back = f"version {rollout.approved}" if rollout.approved else "the version that they deployed before"
    line = f"{one.words}; canaries go back to {back}"
    return replace(rollout, stopped=stopped, num_stopped=rollout.num_stopped + 1), line


def _stood(rollout: Rollout, number: int, now: float, rule: AdoptionSection) -> int:
    """Return the number of `watch` periods since the canaries were drawn."""
    if isinstance(rule.watch, str):
        return int((now - rollout.since_s) // seconds_of_span(rule.watch, "watch"))
    return (number - rollout.since_round) // rule.watch


def _drawn(
    rollout: Rollout, number: int, now: float, devices: Sequence[DeviceId], rule: AdoptionSection, key: Key
) -> Rollout:
    """Return the roll-out with canaries drawn for the version on trial; equal devices give equal canaries."""
    draws = key.child(rollout.trial, rollout.draw)
    order = sorted(devices, key=lambda device: int(draws.child(device).bits(1)[0]))
    canaries = tuple(sorted(order[: max(1, math.ceil(rule.canary * len(order)))]))
    return replace(
        rollout, canaries=canaries, draw=rollout.draw + 1, since_round=number, since_s=now, reporting={}
    )
