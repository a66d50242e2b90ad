"""How a new version of the shared model goes out: to canaries first, then to all, or to nobody.

A version is the shared model after a round. One at a time is on trial: its canaries, drawn by the run's key,
serve it, the others go on with the version that was approved before. Each canary holds the two against each
other on its own held-out samples (the paired difference that the gate of [adoption] asks for as well), and
when the version has stood for `watch` it is judged. It goes out to all, or its roll-out is stopped; either
way the shared model of that moment is the next on trial.

**The judge** counts canaries, not amounts. A version is worse when more than half of those that tell are each
shown to lose by it, with a confidence that is chosen so that a version that is in truth no worse is stopped
in 1 - `regression` of roll-outs at most: of one canary its own test decides, of many a bare majority of
means. So a canary that lies has one vote, however large its number, and fewer than half of them stop or pass
nothing by themselves. A device without held-out samples says nothing and counts for nobody.

All of this is a function of what was told: the same in a simulation, and after a restart at any point.
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

MOST_STOPPED = 20  # of which is told
_STEPS = 60  # of a bisection: to the last bit of a double


class Stopped(Struct, frozen=True):
    """A version whose roll-out was stopped: nobody serves it.

    Attributes:
        version: its number.
        round: after which that was decided.
        worse, told: canaries that were shown to lose by it, of how many.
    """

    version: int
    round: int
    worse: int
    told: int

    @property
    def words(self) -> str:
        """In one line."""
        return (
            f"version {self.version} stopped after round {self.round}: worse on {self.worse} of"
            f" {self.told} canaries"
        )


class Rollout(Struct, frozen=True, omit_defaults=True):
    """The versions of a run's shared model.

    Attributes:
        approved: the newest that is out for all; 0: what the run began with.
        trial: the one on trial; 0: none.
        canaries: who serve it, ascending.
        draw: how often they were drawn for it.
        since_round, since_s: when they were drawn last, the round and the run's clock.
        told: what they said last.
        stopped: the latest versions that were found to be worse.
        num_stopped, num_approved: over the whole run.
    """

    approved: int = 0
    trial: int = 0
    canaries: tuple[DeviceId, ...] = ()
    draw: int = 0
    since_round: int = 0
    since_s: float = 0.0
    told: dict[DeviceId, Comparison] = {}
    stopped: tuple[Stopped, ...] = ()
    num_stopped: int = 0
    num_approved: int = 0

    @property
    def words(self) -> str:
        """How the roll-out stands, in one line."""
        said = [f"version {self.approved} is out" if self.approved else "none is out yet"]
        if self.trial:
            told = f"{len(self.told)} of {len(self.canaries)} canaries tell"
            said.append(f"{self.trial} on trial since round {self.since_round}, {told}")
        if self.stopped:
            said.append(self.stopped[-1].words)
        return "; ".join(said)

    @property
    def short(self) -> str:
        """Which version is out and which on trial, in a few words."""
        out = f"{self.approved} is out" if self.approved else "none is out yet"
        return f"{out}, {self.trial} on trial" if self.trial else out


def heard(rollout: Rollout, device: DeviceId, found: Comparison) -> Rollout:
    """With what a device found; what is not of the version on trial, or not of a canary of it, is nothing."""
    if device not in rollout.canaries or (found.new, found.old) != (rollout.trial, rollout.approved):
        return rollout
    return replace(rollout, told={**rollout.told, device: found})


def after_round(
    rollout: Rollout, number: int, now: float, devices: Sequence[DeviceId], rule: AdoptionSection, key: Key
) -> tuple[Rollout, str]:
    """The roll-out when a round has closed, and a line for people where anything was decided.

    Args:
        rollout: with all that was `heard` in this round.
        number: of the round; the shared model after it is a version, if one is due.
        now: on the run's clock, seconds.
        devices: that may be canaries, ascending.
        rule: of the run.
        key: of the run's draws of canaries.
    """
    line = ""
    if rollout.trial:
        overdue = _stood(rollout, number, now, rule)
        told = len(rollout.told)
        if not overdue or (2 * told < len(rollout.canaries) and overdue < 2):
            return rollout, ""
        if not told:
            return _drawn(rollout, number, now, devices, rule, key), (
                f"version {rollout.trial}: none of its canaries told anything; others are drawn"
            )
        rollout, line = _judged(rollout, number, rule.regression)
    fresh = replace(rollout, trial=number, draw=0, told={})
    return _drawn(fresh, number, now, devices, rule, key), line


def rolled_back(rollout: Rollout, number: int) -> Rollout:
    """A round that had closed never was: the shared model after it is no version."""
    if rollout.trial != number:
        return rollout
    return replace(rollout, trial=0, canaries=(), told={}, draw=0)


def worse_canaries(told: Mapping[DeviceId, Comparison], regression: float) -> tuple[int, bool]:
    """How many canaries are shown to lose, and whether that stops the roll-out: the judge."""
    least = len(told) // 2 + 1
    confidence = 1.0 - chance_of_each(len(told), least, 1.0 - regression)
    worse = sum(_loses(found, confidence) for found in told.values())
    return worse, worse >= least


def chance_of_each(count: int, least: int, chance: float) -> float:
    """The chance at which at least `least` of `count` independent things happen with probability `chance`."""
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
    worse, stops = worse_canaries(rollout.told, regression)
    if not stops:
        line = f"version {rollout.trial} goes out to all: worse on {worse} of {len(rollout.told)} canaries"
        return replace(rollout, approved=rollout.trial, num_approved=rollout.num_approved + 1), line
    one = Stopped(rollout.trial, number, worse, len(rollout.told))
    stopped = (*rollout.stopped, one)[-MOST_STOPPED:]
    back = f"version {rollout.approved}" if rollout.approved else "what they served before"
    line = f"{one.words}; canaries go back to {back}"
    return replace(rollout, stopped=stopped, num_stopped=rollout.num_stopped + 1), line


def _stood(rollout: Rollout, number: int, now: float, rule: AdoptionSection) -> int:
    """How often `watch` has gone by since the canaries were drawn."""
    if isinstance(rule.watch, str):
        return int((now - rollout.since_s) // seconds_of_span(rule.watch, "watch"))
    return (number - rollout.since_round) // rule.watch


def _drawn(
    rollout: Rollout, number: int, now: float, devices: Sequence[DeviceId], rule: AdoptionSection, key: Key
) -> Rollout:
    """With canaries for the version on trial; the same devices always give the same ones."""
    draws = key.child(rollout.trial, rollout.draw)
    order = sorted(devices, key=lambda device: int(draws.child(device).bits(1)[0]))
    canaries = tuple(sorted(order[: max(1, math.ceil(rule.canary * len(order)))]))
    return replace(
        rollout, canaries=canaries, draw=rollout.draw + 1, since_round=number, since_s=now, told={}
    )
