"""How much sooner, or with how much less, each way came to a score than the best fixed one. No I/O.

The score of a fleet after a round is the mean over all its devices, each with its latest reply; those that
never took part count as 0. It is smoothed over three rounds, so that luck of one does not decide. The target
is `SHARE` of what the method's best fixed ratio ended with, seed by seed, unless it is said. What plays more
rounds than they is cut where that one's last round ended.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean

from fleetune.tools.compare.played import Played, Point
from fleetune.tools.compare.ratios.matrix import FEDAVG, Group, Way

SHARE = 0.97
SMOOTHED = 3  # rounds
FIGURES = ("seconds", "joules", "megabytes")
OF_OBJECTIVE = {"time": "seconds", "energy": "joules", "bytes": "megabytes"}


@dataclass(frozen=True)
class Course:
    """One run.

    Attributes:
        seed: of it.
        score: of the fleet in the end.
        target: that is asked for.
        round: in which it was reached; None: never.
        seconds, joules, megabytes: until then: simulated, of all boards with idling, of updates; None: never,
            or not known.
        lasted_s: of all its rounds.
        served: devices that took part.
        late: share of replies that were asked for and did not count.
    """

    seed: int
    score: float
    target: float
    round: int | None
    seconds: float | None
    joules: float | None
    megabytes: float | None
    lasted_s: float
    served: int
    late: float

    def taken(self, figure: str) -> float | None:
        """One of `FIGURES`."""
        value: float | None = getattr(self, figure)
        return value


@dataclass(frozen=True)
class Verdict:
    """One way in a group, all seeds.

    Attributes:
        way: which.
        courses: by ascending seed.
        times: of each figure how many times less it took than the best fixed way, by ascending seed; None:
            it never came to the target, or nothing fixed did.
    """

    way: Way
    courses: Sequence[Course]
    times: Mapping[str, Sequence[float | None]]

    @property
    def judged_by(self) -> str:
        """The figure that it is to take least of."""
        return OF_OBJECTIVE.get(self.way.objective or "", FIGURES[0])


def verdicts(
    group: Group, ways: Sequence[Way], runs: Sequence[Played], target: float | None
) -> list[Verdict]:
    """Of all ways that were played with a seed of which every fixed ratio was played.

    `target`: absolute; None: see above.
    """
    by_label = {(run.label, run.seed): run for run in runs if run.records}
    found = {
        way: {seed: by_label.get((group.labels[way.words], seed)) for seed in _seeds(runs)} for way in ways
    }
    fixed = [way for way in ways if way.is_fixed]
    seeds = [seed for seed in _seeds(runs) if all(found[way][seed] for way in fixed)]
    courses: dict[Way, list[Course]] = {way: [] for way in ways}
    for seed in seeds:
        there = {way: run for way in ways if (run := found[way][seed]) is not None}
        best = _best_fixed(there)
        wanted = SHARE * scores(best)[-1] if target is None else target
        for way, run in there.items():
            courses[way].append(_course(run, wanted, inf if way.longer == 1 else best.points[-1].closed_s))
    least = {figure: _least(figure, [courses[way] for way in fixed]) for figure in FIGURES}
    return [
        Verdict(way, own, {figure: [_times(figure, one, least[figure]) for one in own] for figure in FIGURES})
        for way, own in courses.items()
        if own
    ]


def _seeds(runs: Sequence[Played]) -> list[int]:
    return sorted({run.seed for run in runs})


def _best_fixed(there: Mapping[Way, Played]) -> Played:
    """The fixed ratio that ended highest; FedAvg, if there is nothing else."""
    fixed = [way for way in there if way.is_fixed]
    ratios = [way for way in fixed if not way.words.startswith(FEDAVG)]
    return max((there[way] for way in ratios or fixed), key=lambda run: scores(run)[-1])


def scores(run: Played) -> list[float]:
    """Of the fleet after each round."""
    devices = max(len(run.idle_w), *(point.known for point in run.points))
    plain = [(point.after or 0.0) * point.known / devices for point in run.points]
    return [fmean(plain[max(0, place + 1 - SMOOTHED) : place + 1]) for place in range(len(plain))]


def _course(run: Played, target: float, until_s: float) -> Course:
    points: Sequence[Point] = [one for one in run.points if one.closed_s <= until_s] or run.points[:1]
    reached, records = scores(run)[: len(points)], run.records[: len(points)]
    at = next((point for point, score in zip(points, reached, strict=True) if score >= target), None)
    asked = sum(len(record.participants) for record in records)
    came = sum(len(record.devices) for record in records)
    return Course(
        seed=run.seed,
        score=reached[-1],
        target=target,
        round=at and at.number,
        seconds=at and at.closed_s,
        joules=at and at.joules,
        megabytes=at and at.up / 1e6,
        lasted_s=points[-1].closed_s,
        served=points[-1].known,
        late=1 - came / asked if asked else 0.0,
    )


def _least(figure: str, fixed: Sequence[Sequence[Course]]) -> dict[int, float]:
    """The least that any of them took, by seed."""
    found: dict[int, float] = {}
    for own in fixed:
        for one in own:
            taken = one.taken(figure)
            if taken is not None:
                found[one.seed] = min(taken, found.get(one.seed, taken))
    return found


def _times(figure: str, one: Course, least: Mapping[int, float]) -> float | None:
    taken = one.taken(figure)
    return least[one.seed] / taken if taken and one.seed in least else None
