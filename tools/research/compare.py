"""`fleetune.compare`: methods on the same fleet and data, each with several seeds."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from fleetune.coordinator.metrics.personal_scores import LOCAL, gains, with_personal
from fleetune.coordinator.metrics.registry import AFTER
from fleetune.coordinator.trackers.tracker import Make
from fleetune.protocols.errors import SettingError
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.run_toml import settings_of
from fleetune.protocols.tasks import task_of
from fleetune.tools.compare.comparison import Comparison
from fleetune.tools.compare.configurations import configurations_of, labels_of, seeds_of
from fleetune.tools.compare.engine import Execution, Experiment, run_experiment
from fleetune.tools.compare.report import report_comparison
from fleetune.tools.compare.rows import device_rows, frame_of
from fleetune.tools.compare.runs import OnRound as OnRoundClosed
from fleetune.tools.compare.runs import RoundClosed
from fleetune.tools.research.request import request_of, workers_of
from fleetune.tools.simulator.caller_samples import Assignment, Data

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

OnRound = Callable[[dict[str, Any]], object]
Methods = str | Sequence[str] | Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, eq=False, repr=False)
class ComparisonResult:
    """Results of several configurations over seeds, on the same fleet and data.

    The data frames need pandas. Each row has the columns `configuration` and `method`; a row of a single run
    also has `seed`. The other columns have the same names as in `fleetune.Result`.

    Attributes:
        folder: the folder with report.html, runs.csv and pictures; each run is in CONFIGURATION/seed-N.
        settings: the settings that all runs share.
        comparison: the results as a `Comparison` of `tools.compare`.
    """

    folder: Path
    settings: RunSettings
    comparison: Comparison

    @cached_property
    def frame(self) -> "pd.DataFrame":
        """All metrics as in runs.csv, one row for each run."""
        return frame_of(self.comparison.run_rows())

    @cached_property
    def means(self) -> "pd.DataFrame":
        """`mean`, `std` (sample deviation) and `count` over seeds of each metric, one row for each
        configuration.
        """
        by: Any = list(self.comparison.keys) or "configuration"
        figures = self.frame.drop(columns=[one for one in ("configuration", "method", "seed") if one != by])
        return figures.groupby(by, sort=False, dropna=False).agg(["mean", "std", "count"])

    @cached_property
    def rounds(self) -> "pd.DataFrame":
        """One row for each run and round; see `tools.compare.rows.round_rows`."""
        return frame_of(self.comparison.round_rows())

    @cached_property
    def devices(self) -> "pd.DataFrame":
        """One row for each run and device; see `tools.compare.rows.device_rows`."""
        return frame_of(
            {**self.comparison.identity(run.label), "seed": run.seed, **row}
            for run in self.comparison.runs
            for row in device_rows(run, settings_of(self.settings, {"run.seed": run.seed}))
        )

    def gains(self, over: str = LOCAL) -> "pd.DataFrame":
        """Return the gain of each device's personal model over the configuration `over`.

        One row for each run and device, paired by seed. A `gain` above 0 is an improvement, for every score.

        Raises:
            SettingError: `over` has no finished run.
        """
        runs = {
            (run.label, run.seed): with_personal(run.summary, run.records) for run in self.comparison.runs
        }
        if all(label != over for label, _ in runs):
            known = ", ".join(dict.fromkeys(label for label, _ in runs))
            raise SettingError(
                f"gains over {over!r}: the comparison has no such configuration; known: {known}"
            )
        return frame_of(
            {**self.comparison.identity(label), "seed": seed, "device": device, "gain": gain}
            for (label, seed), summary in runs.items()
            if label != over and (over, seed) in runs
            for device, gain in gains(summary, runs[over, seed]).items()
        )

    def plot(self, name: str = "accuracy-by-round") -> "Figure":
        """Return one of the report's pictures, as a matplotlib figure that notebooks show.

        Args:
            name: `accuracy-by-round`, `accuracy-by-uplink`, `accuracy-by-time` or `accuracy-by-device`. The
                names are the same for every score. A sweep also has `score-by-SECTION.KEY`.

        Raises:
            SettingError: there is no such picture.
        """
        from fleetune.coordinator.reports.pictures.theme import png
        from fleetune.tools.compare.plots import draw

        figures = draw(self.comparison)
        if name not in figures:
            raise SettingError(f"plot: there is no picture {name!r}; known: {', '.join(figures)}")
        figure = figures[name]
        setattr(figure, "_repr_png_", partial(png, figure))  # noqa: B010 - read by IPython
        return figure

    def __repr__(self) -> str:
        labels = ", ".join(one.label for one in self.comparison.shown)
        return f"<{labels}; {len(self.comparison.runs)} runs: {self.folder}>"


def compare(
    settings: RunSettings | Mapping[str, Any] | Path | str,
    methods: Methods | None = None,
    *,
    seeds: int | Iterable[int] = 1,
    runs: Path | str = "runs",
    set: Mapping[str, Any] | None = None,  # noqa: A002 - as `edge-sim compare --set`
    data: Data | None = None,
    partition: Assignment | None = None,
    target: float | None = None,
    on_round: OnRound | None = None,
    workers: int | None = 0,
    fresh: bool = False,
    trackers: Sequence[str | Make] = (),
    engine: str = "local",
    address: str | None = None,
    console: Console | None = None,
) -> ComparisonResult:
    """Simulate several methods with several seeds, and write tables and a page to `runs`/<name>.compare.

    Runs that are finished there with the same settings are not repeated. After an interruption the same call
    continues.

    Args:
        settings: see `fleetune.simulate`.
        methods: names of methods, patterns of names, or labels of [compare] tables. Or a dict of labels with
            their settings: {"fedspu": {}, "small": {"name": "fedspu", "ratios": [0.2]}}. None: local-only,
            fedavg, the settings' own method, and all of [compare].
        seeds: number of seeds from `run.seed` on, or a list of seeds.
        runs: the folder of runs.
        set: see `fleetune.simulate`.
        data: see `fleetune.simulate`.
        partition: see `fleetune.simulate`; a function is called once a seed.
        target: score for which costs are reported; None: 95 % of the best method's final score.
        on_round: called for each closed training round with its configuration, method, seed, round and score.
        workers: total number of processes, each with a run of its own. 0: this process does all the work;
            None: one process a core.
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
    changes = dict(set or {})
    if isinstance(methods, Mapping):
        changes |= {f"compare.{label}": section for label, section in methods.items() if section}
    words = methods if methods is None or isinstance(methods, str) else ",".join(methods)
    request = request_of(settings, changes, data, partition)
    asked = request.settings
    folder = Path(runs) / f"{asked.run.name}.compare"
    cards = len(asked.fleet.cards)
    with workers_of(engine, address, workers, cards, in_arguments=console is None) as (most, cluster):
        execution = Execution(
            folder,
            most,
            fresh=fresh,
            console=console or Console(quiet=True),
            samples_of=request.samples_of,
            on_round=_as_rows(on_round, asked),
            trackers=tuple(trackers),
            cluster=cluster,
        )
        experiment = Experiment(
            asked, configurations_of(asked, labels_of(asked, words)), seeds_of(asked, seeds), target
        )
        report = partial(report_comparison, asked, execution)
        return ComparisonResult(folder, asked, run_experiment(experiment, execution, report))


def _as_rows(on_round: OnRound | None, settings: RunSettings) -> OnRoundClosed | None:
    if on_round is None:
        return None
    column = AFTER.column(task_of(settings.task).score)

    def closed(news: RoundClosed) -> None:
        if not news.final_evaluation:
            run = news.run
            row = {"configuration": run.label, "method": run.settings.method["name"]}
            on_round({**row, "seed": run.settings.run.seed, "round": news.number, column: news.score})

    return closed
