"""What several methods came to on the same fleet: each run's figures, and their mean over seeds. No I/O."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fleetune.coordinator.metrics.metric import Metric
from fleetune.coordinator.metrics.personal_scores import better_by
from fleetune.coordinator.metrics.registry import PERSONAL_MEAN, VALIDATION_MEAN
from fleetune.protocols.tasks.scores import ACCURACY, Score
from fleetune.tools.compare.figures import Figures, Target, figures_of
from fleetune.tools.compare.played import Played

SHARE_OF_BEST = 0.95
AS_ASKED = "as asked for"


@dataclass(frozen=True)
class Contender:
    """Who is compared.

    Attributes:
        label: what it is called in tables and plots, and its folder.
        method: its [method] section, `name` included.
        changes: what it has instead of the file's other settings, `section.key` each.
        within: labels of those whose time is all that it is given, seed by seed; (): it plays all its rounds.
    """

    label: str
    method: Mapping[str, Any]
    changes: Mapping[str, Any] = field(default_factory=dict)
    within: tuple[str, ...] = ()

    @property
    def options(self) -> str:
        """The settings that are not its defaults or the file's, in one line."""
        options = {key: value for key, value in self.method.items() if key != "name"}
        options |= {path.rpartition(".")[2]: value for path, value in self.changes.items()}
        return ", ".join(
            "ratios: as each chooses" if (key, value) == ("ratios", []) else f"{key} = {value}"
            for key, value in options.items()
        )


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation (None: of one value only) of `count` values over seeds."""

    mean: float
    deviation: float | None
    count: int


@dataclass(frozen=True)
class Comparison:
    """Contenders side by side.

    Attributes:
        name: of the run file.
        contenders: in the order asked for.
        seeds: asked for.
        runs: those that are finished.
        target: see `Target`; None: no run has a score.
        each: what a contender is.
    """

    name: str
    contenders: tuple[Contender, ...]
    seeds: tuple[int, ...]
    runs: tuple[Played, ...]
    target: Target | None
    each: str = "method"

    @property
    def score(self) -> Score:
        """By which all of them are judged: they play the same run.toml."""
        return self.runs[0].summary.judged_by if self.runs else ACCURACY

    @cached_property
    def figures(self) -> tuple[Figures, ...]:
        return tuple(figures_of(run, self.target) for run in self.runs)

    @property
    def ranked_by(self) -> Metric:
        """What a sweep ranks by: the score on validation samples; where a run has none, on test samples."""
        told = [VALIDATION_MEAN.of_run(run.summary) for run in self.runs]
        return PERSONAL_MEAN if None in told or not told else VALIDATION_MEAN

    @property
    def about_ranking(self) -> str:
        """On which samples the ranking stands, for people."""
        if self.ranked_by == VALIDATION_MEAN:
            return "ranked by validation samples; the mean is on test samples"
        return "ranked by test samples, so the best score is optimistic: hold out data.validation_fraction"

    @property
    def shown(self) -> list[Contender]:
        """Those with a finished run."""
        there = {run.label for run in self.runs}
        return [contender for contender in self.contenders if contender.label in there]

    def of(self, label: str) -> list[Played]:
        return [run for run in self.runs if run.label == label]

    def spread(self, label: str, metric: Metric) -> Spread | None:
        """Of one figure over the contender's seeds; None when no run has it."""
        return spread(one.of(metric) for one in self.figures if one.contender == label)

    def difference(self, label: str, other: str, metric: Metric) -> Spread | None:
        """Of `label` less `other` over the seeds that both have; None when there is none."""
        mine, theirs = (
            {one.seed: one.of(metric) for one in self.figures if one.contender == name}
            for name in (label, other)
        )
        pairs = ((mine[seed], theirs.get(seed)) for seed in mine)
        return spread(a - b for a, b in pairs if a is not None and b is not None)


def spread(values: Iterable[float | None]) -> Spread | None:
    """Of the values that are there; None when there is none."""
    there = [value for value in values if value is not None]
    if not there:
        return None
    return Spread(statistics.fmean(there), statistics.stdev(there) if len(there) > 1 else None, len(there))


def target_of(runs: Sequence[Played], score: float | None, each: str = "method") -> Target | None:
    """The target that was asked for, else 95 % of the best contender's personal score in the end; where less
    is better, as much more than that.
    """
    if score is not None:
        return Target(score, AS_ASKED)
    ends: dict[str, list[float | None]] = {}
    for run in runs:
        ends.setdefault(run.label, []).append(PERSONAL_MEAN.of_run(run.summary))
    means = {label: found.mean for label, values in ends.items() if (found := spread(values))}
    if not means:
        return None
    sign = better_by(runs[0].summary.judged_by)
    best = max(means, key=lambda label: sign * means[label])
    share = SHARE_OF_BEST if sign > 0 else 1 / SHARE_OF_BEST
    reason = f"{share:.0%} of what the best {each} ended with ({best})".replace("%", " %")
    return Target(share * means[best], reason)
