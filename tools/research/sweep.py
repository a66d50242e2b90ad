"""`fleetune.sweep`: combinations of settings, all of them or those of a search, ranked by score."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from fleetune.coordinator.metrics.registry import PERSONAL_MEAN
from fleetune.coordinator.trackers.tracker import Make
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.tools.compare.configurations import seeds_of
from fleetune.tools.compare.engine import Execution, Experiment, run_experiment
from fleetune.tools.compare.report import report_sweep
from fleetune.tools.compare.sweep_axes import axes_of, combinations
from fleetune.tools.research.compare import ComparisonResult
from fleetune.tools.research.request import request_of, workers_of
from fleetune.tools.simulator.caller_samples import Assignment, Data


@dataclass(frozen=True, eq=False, repr=False)
class SweepResult(ComparisonResult):
    """Results of combinations of some settings, the best first.

    Each row of the data frames also has the varied settings by their `section.key`, as JSON unless they are
    numbers or texts. These settings are the index of `means`.
    """

    @property
    def keys(self) -> tuple[str, ...]:
        """The varied settings, in the order of the call."""
        return self.comparison.keys

    @property
    def best(self) -> dict[str, Any]:
        """The settings with the best personal models, for `set` in another run."""
        return {key: self.comparison.shown[0].value(key) for key in self.keys}

    def __repr__(self) -> str:
        first = self.comparison.shown[:1]
        metric = self.comparison.ranked_by
        found = self.comparison.spread(first[0].label, metric) if first else None
        samples = "test" if metric == PERSONAL_MEAN else "validation"
        best = f"; best on {samples} samples: {first[0].label} ({found.mean:.3g})" if found else ""
        counts = f"{len(self.comparison.shown)} combinations, {len(self.comparison.runs)} runs"
        return f"<{counts}: {self.folder}{best}>"


def sweep(
    settings: RunSettings | Mapping[str, Any] | Path | str,
    over: Mapping[str, Sequence[Any] | str] | Sequence[str],
    *,
    seeds: int | Iterable[int] = 1,
    runs: Path | str = "runs",
    set: Mapping[str, Any] | None = None,  # noqa: A002 - as `edge-sim sweep --set`
    data: Data | None = None,
    partition: Assignment | None = None,
    target: float | None = None,
    search: int | None = None,
    workers: int | None = 0,
    fresh: bool = False,
    trackers: Sequence[str | Make] = (),
    engine: str = "local",
    address: str | None = None,
    console: Console | None = None,
) -> SweepResult:
    """Simulate combinations of some settings with several seeds, rank them, and write `runs`/<name>.sweep.

    Runs that are finished there with the same settings are not repeated. After an interruption the same call
    continues. With more values or seeds only the new runs are executed.

    Args:
        settings: see `fleetune.simulate`.
        over: values by `section.key`: {"training.epochs": [1, 3], "training.learning_rate": [0.02, 0.05]};
            arrays and numbers of NumPy too. With `search` also a range as text:
            {"training.learning_rate": "0.01..0.2:log", "training.epochs": "1..5"}. Or a list of
            "section.key=value,value".
        seeds: number of seeds from `run.seed` on, or a list of seeds.
        runs: the folder of runs.
        set: see `fleetune.simulate`.
        data: see `fleetune.simulate`.
        partition: see `fleetune.simulate`; a function is called once a seed.
        target: score for which costs are reported; None: 95 % of the best combination's final score.
        search: number of trials that Optuna may choose, earlier ones included; None for every combination.
        workers: see `fleetune.compare`.
        fresh: True repeats finished runs, too.
        trackers: experiment trackers that follow each run, see `fleetune.simulate`.
        engine: see `fleetune.simulate`.
        address: see `fleetune.simulate`.
        console: shows progress and the tables; None shows nothing.

    Raises:
        FleetuneError: a setting is wrong, and nothing was executed; or some runs failed, and the others are
            stored.
        KeyboardInterrupt: interrupted; finished runs are stored.
    """
    request = request_of(settings, set, data, partition)
    asked = request.settings
    folder = Path(runs) / f"{asked.run.name}.sweep"
    cards = len(asked.fleet.cards)
    with workers_of(engine, address, workers, cards, in_arguments=console is None) as (most, cluster):
        execution = Execution(
            folder,
            most,
            fresh=fresh,
            console=console or Console(quiet=True),
            samples_of=request.samples_of,
            trackers=tuple(trackers),
            cluster=cluster,
        )
        axes, of_each = axes_of(over), seeds_of(asked, seeds)
        keys = tuple(axis.key for axis in axes)
        report = partial(report_sweep, asked, execution)
        if search is None:
            chosen = combinations(asked, axes, len(of_each))
            experiment = Experiment(asked, chosen, of_each, target, keys)
            comparison = run_experiment(experiment, execution, report)
        else:
            from fleetune.tools.compare.search import run_search

            experiment = Experiment(asked, (), of_each, target, keys)
            comparison = run_search(experiment, axes, search, execution, report)
        return SweepResult(folder, asked, comparison.ranked)
