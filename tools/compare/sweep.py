"""edge-sim sweep: one run.toml with every combination of some settings, each with several seeds."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod
from typing import Any

from fleetune.coordinator.metrics import readable
from fleetune.coordinator.metrics.personal_scores import better_by
from fleetune.coordinator.metrics.registry import VALIDATION_MEAN
from fleetune.coordinator.reports.html import Plot
from fleetune.coordinator.reports.report import paint
from fleetune.protocols.errors import FleetuneError, SettingError
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.tasks import task_of
from fleetune.tools.compare.axes import Axis, Range, combination, grid_of
from fleetune.tools.compare.compare import as_text, leave, unpainted
from fleetune.tools.compare.comparison import Comparison, Contender
from fleetune.tools.compare.contenders import check_target, seeds_of
from fleetune.tools.compare.page import ComparisonPage, write_comparison
from fleetune.tools.compare.side_by_side import Outcome, Question, Report, Work, comparison_of, side_by_side
from fleetune.tools.compare.sweep_tables import (
    combinations_csv,
    sweep_summary,
    sweep_table,
)
from fleetune.tools.compare.tables import rounds_csv, runs_csv

MOST_RUNS = 100_000
DRAWN = 8  # combinations whose curves are drawn; more are a tangle


def sweep(
    settings: RunSettings,
    axes: Sequence[Axis | Range],
    work: Work,
    *,
    seeds: int | Sequence[int],
    target: float | None,
    search: int | None = None,
) -> Comparison:
    """Play every combination, or those that a search chooses, and leave tables, pictures, a page and
    summary.json; the best comes first.

    Args:
        settings: of the run file; `run.seed` is the first seed.
        axes: what is combined.
        work: how; in its folder each run is kept in COMBINATION/seed-N.
        seeds: how many, or which.
        target: score whose cost is asked for; None: 95 % of what the best combination ended with.
        search: how many trials Optuna may choose, those of before among them; None: every combination.

    Raises:
        SettingError: a combination is none that there can be, or there are too many; nothing was played.
        FleetuneError: runs could not be played; all others are in the report.
        KeyboardInterrupt: interrupted; what is finished is in the report.
    """
    seeds = seeds_of(settings, seeds)
    report = partial(_report, settings, axes, work)
    if search is not None:
        return ranked(_search(settings, axes, work, seeds, target, search, report))
    contenders = combinations(settings, grid_of(axes), len(seeds))
    return ranked(side_by_side(Question(settings, contenders, seeds, target, "combination"), work, report))


def _search(
    settings: RunSettings,
    axes: Sequence[Axis | Range],
    work: Work,
    seeds: Sequence[int],
    target: float | None,
    trials: int,
    report: Report,
) -> Comparison:
    from fleetune.tools.compare.search import Search, check_search

    check_search(settings, axes, trials)
    check_target(target, task_of(settings.task).score)
    searching = Search(settings, axes, seeds, work)
    ended: BaseException | None = None
    try:
        searching.run(trials)
    except (KeyboardInterrupt, FleetuneError) as problem:
        ended = problem
    question = Question(settings, searching.contenders(), seeds, target, "combination")
    comparison = comparison_of(question, work)
    if comparison.runs:
        report(Outcome(comparison, searching.failed, isinstance(ended, KeyboardInterrupt)))
    if ended is not None:
        raise ended
    return comparison


def combinations(settings: RunSettings, axes: Sequence[Axis], num_seeds: int) -> list[Contender]:
    """A contender for each combination, the values of the last axis changing first.

    Raises:
        SettingError: there are too many.
    """
    num_runs = prod(len(axis.values) for axis in axes) * num_seeds
    if num_runs > MOST_RUNS:
        raise SettingError(f"--over: {num_runs:,} runs; at most {MOST_RUNS:,}: give fewer values or seeds")
    keys = [axis.key for axis in axes]
    return [
        combination(settings, dict(zip(keys, values, strict=True)))
        for values in product(*(axis.values for axis in axes))
    ]


def ranked(comparison: Comparison) -> Comparison:
    """With the best combination first: by `ranked_by`, mean over seeds; one without it comes last."""
    sign = better_by(comparison.score)

    def place(contender: Contender) -> float:
        found = comparison.spread(contender.label, comparison.ranked_by)
        return float("inf") if found is None else -sign * found.mean

    return replace(comparison, contenders=tuple(sorted(comparison.contenders, key=place)))


def _report(settings: RunSettings, axes: Sequence[Axis | Range], work: Work, outcome: Outcome) -> None:
    comparison, console = ranked(outcome.comparison), work.console
    keys = [axis.key for axis in axes]
    files = {
        "sweep.csv": combinations_csv(comparison, keys),
        "runs.csv": runs_csv(comparison),
        "rounds.csv": rounds_csv(comparison),
        "summary.json": sweep_summary(comparison, {axis.key: _asked(axis) for axis in axes}, outcome.failed),
    }
    plots: list[Plot] = []
    remark = unpainted(outcome)
    if not remark:
        from fleetune.tools.compare.plots import draw
        from fleetune.tools.compare.sweep_plot import score_by_setting

        foremost = replace(comparison, contenders=tuple(comparison.shown[:DRAWN]))
        plots, pngs = paint(
            lambda theme: {**score_by_setting(comparison, keys, theme), **draw(foremost, theme)}
        )
        files.update(pngs)
        if len(comparison.shown) > DRAWN:
            remark = f"Curves are of the best {DRAWN} of {len(comparison.shown)} combinations."
    page = ComparisonPage(comparison, plots, outcome.failed, as_text(settings), remark)
    files["report.html"] = write_comparison(page)
    for picture in work.folder.glob("score-by-*.png"):  # of settings that varied in another sweep
        picture.unlink()
    leave(files, work.folder)
    console.print(sweep_table(comparison, keys))
    for name in ("report.html", "sweep.csv", "summary.json"):
        console.print(f"  {work.folder / name}", soft_wrap=True)
    samples = "validation" if comparison.ranked_by == VALIDATION_MEAN else "test"
    best = readable.printable(comparison.shown[0].label)
    console.print(f"[bold]{best}[/bold] does best on {samples} samples", soft_wrap=True)


def _asked(axis: Axis | Range) -> Any:
    return axis.words if isinstance(axis, Range) else axis.values
