"""Savings of time, energy and bytes to a score, of each candidate over the best fixed candidate. No I/O.

The score of a fleet after a round is the mean over all its devices, each with its latest reply; a device that
never took part counts as 0. It is averaged over three rounds to limit the effect of chance. The target is
`SHARE` of the final score of the method's best fixed ratio, by seed, unless the user names one. A candidate
with more rounds is cut at the end of the best fixed ratio.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean

from benchmarks.ratios.matrix import FEDAVG, Candidate, Group
from fleetune.tools.compare.finished_run import FinishedRun, Point

SHARE = 0.97
SMOOTHED = 3  # number of rounds in the moving average
FIGURES = ("seconds", "joules", "megabytes")
OF_OBJECTIVE = {"time": "seconds", "energy": "joules", "bytes": "megabytes"}


@dataclass(frozen=True)
class RunOutcome:
    """How one run reached the target.

    Attributes:
        seed: seed of the run.
        score: final score of the fleet.
        target: the score to reach.
        round: round in which it was reached; None if never.
        seconds, joules, megabytes: costs until then: simulated time, energy of all boards with idling,
            updates sent up; None if the target was never reached, or the cost is unknown.
        lasted_s: simulated time of all rounds.
        num_devices: number of devices that took part.
        late: share of expected replies that did not count.
    """

    seed: int
    score: float
    target: float
    round: int | None
    seconds: float | None
    joules: float | None
    megabytes: float | None
    lasted_s: float
    num_devices: int
    late: float

    def taken(self, figure: str) -> float | None:
        """One of `FIGURES`."""
        value: float | None = getattr(self, figure)
        return value


@dataclass(frozen=True)
class Verdict:
    """One candidate of a group, all seeds.

    Attributes:
        candidate: the candidate.
        outcomes: outcomes by ascending seed.
        times: saving factors over the best fixed candidate, by figure and ascending seed; None if one of the
            two never reached the target.
    """

    candidate: Candidate
    outcomes: Sequence[RunOutcome]
    times: Mapping[str, Sequence[float | None]]

    @property
    def judged_by(self) -> str:
        """The figure that the candidate minimises."""
        return OF_OBJECTIVE.get(self.candidate.objective or "", FIGURES[0])


def verdicts(
    group: Group, candidates: Sequence[Candidate], runs: Sequence[FinishedRun], target: float | None
) -> list[Verdict]:
    """The verdicts over the seeds for which every fixed candidate is finished.

    `target`: the score to reach; None: `SHARE` of the best fixed ratio's final score.
    """
    by_label = {(run.label, run.seed): run for run in runs if run.records}
    found = {
        candidate: {seed: by_label.get((group.labels[candidate.words], seed)) for seed in _seeds(runs)}
        for candidate in candidates
    }
    fixed = [candidate for candidate in candidates if candidate.is_fixed]
    seeds = [seed for seed in _seeds(runs) if all(found[candidate][seed] for candidate in fixed)]
    outcomes: dict[Candidate, list[RunOutcome]] = {candidate: [] for candidate in candidates}
    for seed in seeds:
        there = {candidate: run for candidate in candidates if (run := found[candidate][seed]) is not None}
        best = _best_fixed(there)
        wanted = SHARE * scores(best)[-1] if target is None else target
        for candidate, run in there.items():
            outcomes[candidate].append(
                _outcome(run, wanted, inf if candidate.longer == 1 else best.history[-1].closed_s)
            )
    least = {figure: _least(figure, [outcomes[candidate] for candidate in fixed]) for figure in FIGURES}
    return [
        Verdict(
            candidate,
            own,
            {figure: [_times(figure, one, least[figure]) for one in own] for figure in FIGURES},
        )
        for candidate, own in outcomes.items()
        if own
    ]


def _seeds(runs: Sequence[FinishedRun]) -> list[int]:
    return sorted({run.seed for run in runs})


def _best_fixed(there: Mapping[Candidate, FinishedRun]) -> FinishedRun:
    """The fixed ratio with the highest final score; FedAvg if there is no ratio."""
    fixed = [candidate for candidate in there if candidate.is_fixed]
    ratios = [candidate for candidate in fixed if not candidate.words.startswith(FEDAVG)]
    return max((there[candidate] for candidate in ratios or fixed), key=lambda run: scores(run)[-1])


def scores(run: FinishedRun) -> list[float]:
    """The score of the fleet after each round."""
    devices = max(len(run.idle_w), *(point.known for point in run.history))
    plain = [(point.after or 0.0) * point.known / devices for point in run.history]
    return [fmean(plain[max(0, place + 1 - SMOOTHED) : place + 1]) for place in range(len(plain))]


def _outcome(run: FinishedRun, target: float, until_s: float) -> RunOutcome:
    points: Sequence[Point] = [one for one in run.history if one.closed_s <= until_s] or run.history[:1]
    reached, records = scores(run)[: len(points)], run.records[: len(points)]
    at = next((point for point, score in zip(points, reached, strict=True) if score >= target), None)
    asked = sum(len(record.participants) for record in records)
    came = sum(len(record.devices) for record in records)
    return RunOutcome(
        seed=run.seed,
        score=reached[-1],
        target=target,
        round=at.number if at else None,
        seconds=at.closed_s if at else None,
        joules=at.joules if at else None,
        megabytes=at.up / 1e6 if at else None,
        lasted_s=points[-1].closed_s,
        num_devices=points[-1].known,
        late=1 - came / asked if asked else 0.0,
    )


def _least(figure: str, fixed: Sequence[Sequence[RunOutcome]]) -> dict[int, float]:
    """The minimum of a figure over the fixed candidates, by seed."""
    found: dict[int, float] = {}
    for own in fixed:
        for one in own:
            taken = one.taken(figure)
            if taken is not None:
                found[one.seed] = min(taken, found.get(one.seed, taken))
    return found


def _times(figure: str, one: RunOutcome, least: Mapping[int, float]) -> float | None:
    taken = one.taken(figure)
    return least[one.seed] / taken if taken and one.seed in least else None
