"""`fleetune.sweep`: every combination of some settings from Python, as `edge-sim sweep` plays them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from fleetune.coordinator.metrics.registry import PERSONAL_MEAN
from fleetune.coordinator.trackers.tracker import Make
from fleetune.protocols.errors import SettingError
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.tools.compare import sweep as command
from fleetune.tools.compare.axes import axes_of
from fleetune.tools.compare.comparison import Comparison
from fleetune.tools.compare.figures import metrics
from fleetune.tools.compare.side_by_side import Work
from fleetune.tools.compare.sweep_tables import in_words, value_of
from fleetune.tools.research.asked import asked_for, crew_of
from fleetune.tools.research.columns import round_rows
from fleetune.tools.research.frames import frame_of
from fleetune.tools.simulator.caller_samples import Assignment, Data, caller_samples

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False, repr=False)
class SweepResult:
    """Every combination of some settings, the best first.

    Its data frames need pandas. Columns are called as in `fleetune.Result`, settings by their `section.key`;
    a setting that is no number and no text stands there as JSON.

    Attributes:
        folder: of the sweep: report.html, sweep.csv, summary.json, pictures.
        settings: of all of them, but for what differs.
        keys: what differs, in the order asked for.
        comparison: the same as `tools.compare` has it.
    """

    folder: Path
    settings: RunSettings
    keys: tuple[str, ...]
    comparison: Comparison

    @property
    def best(self) -> dict[str, Any]:
        """The settings whose personal models do best, to be `set` in another run."""
        return {key: value_of(self.comparison.shown[0], key) for key in self.keys}

    @cached_property
    def frame(self) -> "pd.DataFrame":
        """A row a combination and seed: all figures of the finished run."""
        values, score = self._values(), self.comparison.score
        return frame_of(
            [
                {
                    **values[one.contender],
                    "seed": one.seed,
                    **{metric.column(score): one.of(metric) for metric in metrics()},
                }
                for one in sorted(self.comparison.figures, key=lambda one: list(values).index(one.contender))
            ]
        )

    @cached_property
    def means(self) -> "pd.DataFrame":
        """A row a combination, the best first: of each figure `mean`, `std` (sample standard deviation) and
        `count` over seeds.
        """
        by_setting = self.frame.drop(columns="seed").groupby(list(self.keys), sort=False, dropna=False)
        return by_setting.agg(["mean", "std", "count"])

    @cached_property
    def rounds(self) -> "pd.DataFrame":
        """A row a combination, seed and round; see `tools.research.columns.round_rows`."""
        values = self._values()
        return frame_of(
            [
                {**values[run.label], "seed": run.seed, **row}
                for run in self.comparison.runs
                for row in round_rows(run)
            ]
        )

    def _values(self) -> dict[str, dict[str, Any]]:
        """Of each combination, by label, the best first."""
        return {
            one.label: {key: _cell(value_of(one, key)) for key in self.keys} for one in self.comparison.shown
        }

    def __repr__(self) -> str:
        first = self.comparison.shown[:1]
        metric = self.comparison.ranked_by
        found = self.comparison.spread(first[0].label, metric) if first else None
        samples = "test" if metric == PERSONAL_MEAN else "validation"
        best = f"; best on {samples} samples: {first[0].label} ({found.mean:.3g})" if found else ""
        counts = f"{len(self.comparison.shown)} combinations, {len(self.comparison.runs)} runs"
        return f"<{counts}: {self.folder}{best}>"


def _cell(value: Any) -> Any:
    return value if isinstance(value, int | float | str) else in_words(value)


def sweep(
    settings: RunSettings | Mapping[str, Any] | Path | str,
    over: Mapping[str, Sequence[Any] | str],
    *,
    seeds: int | Iterable[int] = 1,
    runs: Path | str = "runs",
    set: Mapping[str, Any] | None = None,  # noqa: A002 - as `edge-sim sweep --set`
    data: Data | None = None,
    partition: Assignment | None = None,
    target: float | None = None,
    search: int | None = None,
    workers: int = 0,
    fresh: bool = False,
    trackers: Sequence[str | Make] = (),
    engine: str = "local",
    address: str | None = None,
) -> SweepResult:
    """Simulate every combination of some settings, or those that a search chooses, with several seeds, and
    rank them, in `runs`/<name>.sweep.

    What is finished there with the same settings is not played again; interrupted, the same call goes on with
    the runs that are missing, and more values or seeds play what is new.

    Args:
        settings: as of `fleetune.simulate`.
        over: values by `section.key`: {"training.epochs": [1, 3], "training.learning_rate": [0.02, 0.05]};
            arrays and numbers of NumPy too. With `search` a range in words, too:
            {"training.learning_rate": "0.01..0.2:log", "training.epochs": "1..5"}.
        seeds: how many, from `run.seed` on, or which.
        runs: the folder of runs.
        set: as of `fleetune.simulate`.
        data: likewise.
        partition: likewise; a function is asked once a seed.
        target: score whose cost is asked for; None: 95 % of what the best combination ended with.
        search: how many trials Optuna may choose, those of before among them; None: every combination.
        workers: processes in all, each with a run of its own; 0: none but this one.
        fresh: play finished runs again, too.
        trackers: experiment trackers that follow each run, as of `fleetune.simulate`.
        engine: as of `fleetune.simulate`.
        address: likewise.

    Raises:
        FleetuneError: a setting is wrong, and nothing was played; or runs could not be played, and the others
            are kept.
        KeyboardInterrupt: interrupted; what is finished is kept.
    """
    asked, dataset = asked_for(settings, set or {}, data)
    folder = Path(runs) / f"{asked.run.name}.sweep"
    console = Console(quiet=True)
    try:
        axes = axes_of(over)
        wanted = seeds if isinstance(seeds, int) else tuple(map(int, seeds))
        with crew_of(engine, address, workers) as (most, cluster):
            work = Work(
                folder,
                most,
                fresh=fresh,
                console=console,
                give=lambda seeded: caller_samples(seeded, dataset, partition),
                trackers=tuple(trackers),
                cluster=cluster,
            )
            comparison = command.sweep(asked, axes, work, seeds=wanted, target=target, search=search)
    except SettingError as problem:
        raise SettingError(str(problem).removeprefix("--")) from None
    return SweepResult(folder, asked, tuple(axis.key for axis in axes), comparison)
