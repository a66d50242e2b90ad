"""edge-sim compare: methods side by side, each with several seeds, on the same fleet and data."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
from rich.console import Console

from fleetune.coordinator.reports.html import Plot
from fleetune.coordinator.reports.report import NO_PICTURES, can_paint, paint
from fleetune.coordinator.trackers.tracker import Make
from fleetune.protocols.files import write_atomically
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.tools.compare.comparison import Comparison
from fleetune.tools.compare.contenders import Give, contenders_of, nothing_given, seeds_of
from fleetune.tools.compare.figures import inside
from fleetune.tools.compare.page import ComparisonPage, write_comparison
from fleetune.tools.compare.side_by_side import Hear, Outcome, Question, Work, side_by_side
from fleetune.tools.compare.tables import (
    diagnostics_csv,
    markdown,
    methods_csv,
    rounds_csv,
    runs_csv,
    tables,
)

NOT_PAINTED = "No pictures, because the comparison was stopped: the same command goes on, and paints them."


def compare(
    settings: RunSettings,
    methods: Sequence[str],
    folder: Path,
    *,
    seeds: int | Sequence[int],
    target: float | None,
    workers: int,
    fresh: bool,
    console: Console,
    give: Give = nothing_given,
    hear: Hear | None = None,
    cluster: str | None = None,
    trackers: Sequence[str | Make] = (),
) -> Comparison:
    """Methods side by side; see `side_by_side`.

    Args:
        settings: of the run file; `run.seed` is the first seed.
        methods: names of methods, or of [compare.LABEL] tables.
        folder: of the comparison; each run in it is kept in LABEL/seed-N.
        seeds: how many, or which.
        target: score (accuracy in (0, 1)) whose cost is asked for; None: see `comparison.target_of`.
        workers: processes in all; 0: none but this one.
        fresh: play finished runs again, too.
        console: to show it on.
        give: what the caller gives a run instead of what [data] names.
        hear: told of every closed round.
        cluster: see `cells.play_all`.
        trackers: experiment trackers that follow each run.

    Raises:
        SettingError: a label, a method's setting or an option is wrong; nothing was played.
        FleetuneError: runs could not be played; all others are in the report.
        KeyboardInterrupt: interrupted; what is finished is in the report.
    """
    question = Question(settings, contenders_of(settings, methods), seeds_of(settings, seeds), target)
    followers = tuple(trackers)
    work = Work(
        folder,
        workers,
        fresh=fresh,
        console=console,
        give=give,
        hear=hear,
        trackers=followers,
        cluster=cluster,
    )
    return side_by_side(question, work, partial(_report, settings, work))


def _report(settings: RunSettings, work: Work, outcome: Outcome) -> None:
    comparison, console = outcome.comparison, work.console
    files = {
        "methods.csv": methods_csv(comparison),
        "methods.md": markdown(comparison),
        "runs.csv": runs_csv(comparison),
        "rounds.csv": rounds_csv(comparison),
    }
    if inside(comparison.runs):
        files["diagnostics.csv"] = diagnostics_csv(comparison)
    plots: list[Plot] = []
    remark = unpainted(outcome)
    if not remark:
        from fleetune.tools.compare.plots import draw

        plots, pngs = paint(lambda theme: draw(comparison, theme))
        files.update(pngs)
    page = ComparisonPage(comparison, plots, outcome.failed, as_text(settings), remark)
    files["report.html"] = write_comparison(page)
    leave(files, work.folder)
    console.print(tables(comparison))
    for name in ("report.html", *(name for name in files if name.endswith((".md", ".csv")))):
        console.print(f"  {work.folder / name}", soft_wrap=True)


def unpainted(outcome: Outcome) -> str:
    """Why there shall be no pictures, in a line; "": there shall be."""
    return NOT_PAINTED if outcome.stopped else "" if can_paint() else NO_PICTURES


def as_text(settings: RunSettings) -> str:
    """For a page."""
    return msgspec.json.format(msgspec.json.encode(settings), indent=2).decode()


def leave(files: Mapping[str, bytes], folder: Path) -> None:
    """Write them. Raises StoreError."""
    for name, data in files.items():
        write_atomically(folder / name, data, durable=False, mode=None)
