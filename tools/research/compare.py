"""`fleetune.compare`: methods side by side over seeds from Python, as `edge-sim compare` plays them."""

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
from fleetune.tools.compare import compare as command
from fleetune.tools.compare.cells import RoundDone
from fleetune.tools.compare.comparison import Comparison
from fleetune.tools.compare.contenders import labels_of
from fleetune.tools.compare.figures import inside, metrics
from fleetune.tools.research.asked import asked_for, crew_of
from fleetune.tools.research.columns import device_rows, round_rows
from fleetune.tools.research.frames import frame_of
from fleetune.tools.simulator.caller_samples import Assignment, Data, caller_samples

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

OnRound = Callable[[dict[str, Any]], object]
Methods = str | Sequence[str] | Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, eq=False, repr=False)
class ComparisonResult:
    """Methods side by side over seeds, on the same fleet and data.

    Its data frames need pandas. Columns are called as in `fleetune.Result`.

    Attributes:
        folder: of the comparison: report.html, tables, pictures, and each run in METHOD/seed-N.
        settings: of all of them, the method and the seed aside.
        comparison: the same as `tools.compare` has it.
    """

    folder: Path
    settings: RunSettings
    comparison: Comparison

    @cached_property
    def frame(self) -> "pd.DataFrame":
        """A row a method and seed: all figures of the finished run, as in runs.csv."""
        score = self.comparison.score
        columns = [*metrics(), *inside(self.comparison.runs)]
        return frame_of(
            [
                {
                    "method": one.contender,
                    "seed": one.seed,
                    **{metric.column(score): one.of(metric) for metric in columns},
                }
                for one in self.comparison.figures
            ]
        )

    @cached_property
    def means(self) -> "pd.DataFrame":
        """A row a method: of each figure `mean`, `std` (sample standard deviation) and `count` over seeds."""
        by_method = self.frame.drop(columns="seed").groupby("method", sort=False)
        return by_method.agg(["mean", "std", "count"])

    @cached_property
    def rounds(self) -> "pd.DataFrame":
        """A row a method, seed and round; see `tools.research.columns.round_rows`."""
        return frame_of(
            [
                {"method": run.label, "seed": run.seed, **row}
                for run in self.comparison.runs
                for row in round_rows(run)
            ]
        )

    @cached_property
    def devices(self) -> "pd.DataFrame":
        """A row a method, seed and device; see `tools.research.columns.device_rows`."""
        return frame_of(
            [
                {"method": run.label, "seed": run.seed, **row}
                for run in self.comparison.runs
                for row in device_rows(run, self._seeded(run.seed))
            ]
        )

    def gains(self, over: str = LOCAL) -> "pd.DataFrame":
        """By how much each device's personal model does better than with the method `over`, seed by seed: a
        row a method, seed and device, `gain` above 0 where it is for the better, whatever the score.

        Raises:
            SettingError: there is no finished run of that method.
        """
        runs = {
            (run.label, run.seed): with_personal(run.summary, run.records) for run in self.comparison.runs
        }
        if all(label != over for label, _ in runs):
            known = ", ".join(dict.fromkeys(label for label, _ in runs))
            raise SettingError(f"gains over {over!r}: it was not compared; known: {known}")
        return frame_of(
            [
                {"method": label, "seed": seed, "device": device, "gain": gain}
                for (label, seed), summary in runs.items()
                if label != over and (over, seed) in runs
                for device, gain in gains(summary, runs[over, seed]).items()
            ]
        )

    def plot(self, name: str = "accuracy-by-round") -> "Figure":
        """One of the report's pictures, as a matplotlib figure that notebooks show.

        Args:
            name: `accuracy-by-round`, `accuracy-before-by-round`, `accuracy-by-uplink`, `accuracy-by-time`,
                `before-and-after` or `spread-over-devices`; of another task's score too.

        Raises:
            SettingError: there is no such picture.
        """
        from fleetune.coordinator.reports.pictures.theme import LIGHT, picture
        from fleetune.tools.compare.plots import draw

        figures = draw(self.comparison, LIGHT)
        if name not in figures:
            raise SettingError(f"plot: no picture {name!r}; known: {', '.join(figures)}")
        figure = figures[name]
        setattr(figure, "_repr_png_", partial(picture, figure, LIGHT, "png"))  # noqa: B010 - read by IPython
        return figure

    def _seeded(self, seed: int) -> RunSettings:
        return settings_of(self.settings, {"run.seed": seed})

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
    workers: int = 0,
    fresh: bool = False,
    trackers: Sequence[str | Make] = (),
    engine: str = "local",
    address: str | None = None,
) -> ComparisonResult:
    """Simulate several methods with several seeds and put them side by side, in `runs`/<name>.compare.

    What is finished there with the same settings is not played again; interrupted, the same call goes on with
    the runs that are missing.

    Args:
        settings: as of `fleetune.simulate`.
        methods: names of methods, patterns of names, or labels of [compare] tables; or a dict of these with
            the settings that each has: {"fedspu": {}, "small": {"name": "fedspu", "ratios": [0.2]}}. None:
            local-only, fedavg, the settings' own method, and what [compare] has.
        seeds: how many, from `run.seed` on, or which.
        runs: the folder of runs.
        set: as of `fleetune.simulate`.
        data: likewise.
        partition: likewise; a function is asked once a seed.
        target: score whose cost is asked for; None: 95 % of what the best method ended with.
        on_round: told of each training round as it closes: method, seed, round, score after local training.
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
    changes = dict(set or {})
    if isinstance(methods, Mapping):
        changes |= {f"compare.{label}": section for label, section in methods.items() if section}
        methods = list(methods)
    asked, dataset = asked_for(settings, changes, data)
    folder = Path(runs) / f"{asked.run.name}.compare"
    try:
        column = AFTER.column(task_of(asked.task).score)
        with crew_of(engine, address, workers) as (most, cluster):
            comparison = command.compare(
                asked,
                _labels(asked, methods),
                folder,
                seeds=seeds if isinstance(seeds, int) else tuple(map(int, seeds)),
                target=target,
                workers=most,
                fresh=fresh,
                console=Console(quiet=True),
                give=lambda seeded: caller_samples(seeded, dataset, partition),
                hear=lambda news: _tell(news, on_round, column),
                trackers=trackers,
                cluster=cluster,
            )
    except SettingError as problem:
        raise SettingError(str(problem).removeprefix("--")) from None
    return ComparisonResult(folder, asked, comparison)


def _tell(news: RoundDone, on_round: OnRound | None, column: str) -> None:
    if on_round is not None and not news.final_evaluation:
        seed = news.cell.settings.run.seed
        on_round({"method": news.cell.label, "seed": seed, "round": news.number, column: news.score})


def _labels(settings: RunSettings, methods: str | Sequence[str] | None) -> list[str]:
    words = methods if methods is None or isinstance(methods, str) else ",".join(methods)
    return labels_of(settings, words)
