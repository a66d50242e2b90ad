"""edge-sim compare: methods side by side, each with several seeds, on the same fleet and data."""

import difflib
import fnmatch
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace
from rich.console import Console
from rich.progress import Progress, TaskID

from fleetune.coordinator.reports.markup import Plot
from fleetune.coordinator.reports.metric import unit_of
from fleetune.coordinator.reports.metrics import DURATION, PERSONAL_MEAN
from fleetune.coordinator.reports.readable import duration
from fleetune.coordinator.reports.report import NO_PICTURES, can_paint, paint
from fleetune.protocols.errors import FleetuneError, SettingError
from fleetune.protocols.files import write_atomically
from fleetune.protocols.methods import REGISTRY, from_section, with_defaults_of_run
from fleetune.protocols.settings.encoding import EncodingSection
from fleetune.protocols.settings.objective import ObjectiveSection
from fleetune.protocols.settings.rate_schedule import with_schedule_of_run
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.run_toml import convert
from fleetune.protocols.settings.simulation import FleetSection
from fleetune.protocols.tasks import task_of
from fleetune.protocols.tasks.scores import Score
from fleetune.tools.compare.cells import Cell, RoundDone, again, finished, forget, play_all
from fleetune.tools.compare.comparison import Comparison, Contender, target_of
from fleetune.tools.compare.figures import inside
from fleetune.tools.compare.page import ComparisonPage, write_comparison
from fleetune.tools.compare.played import Played
from fleetune.tools.compare.tables import (
    internals_csv,
    markdown,
    methods_csv,
    rounds_csv,
    runs_csv,
    tables,
)
from fleetune.tools.simulator.given import NOTHING_GIVEN, Given
from fleetune.tools.simulator.show import progress_bar
from fleetune.tools.stop_signals import ToldInterrupt

NOT_PAINTED = "No pictures, because the comparison was stopped: the same command goes on, and paints them."
YARDSTICKS = ("local-only", "fedavg")
Give = Callable[[RunSettings], Given]  # of the run's settings, its seed among them
Hear = Callable[[RoundDone], None]


def _nothing(_: RunSettings) -> Given:
    return NOTHING_GIVEN


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
    give: Give = _nothing,
    hear: Hear | None = None,
) -> Comparison:
    """Play what is not finished yet, then leave tables, plots and the page in `folder` and show them.

    Interrupted, it says so and does the same with what is finished, without pictures, which take their time;
    asked again, it goes on from there.

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

    Raises:
        SettingError: a label, a method's setting or an option is wrong; nothing was played.
        FleetuneError: runs could not be played; all others are in the report.
        KeyboardInterrupt: interrupted; what is finished is in the report.
    """
    seeds = seeds_of(settings, seeds)
    _check_target(target, task_of(settings.task).score)
    contenders = contenders_of(settings, methods)
    cells = cells_of(settings, contenders, seeds, folder, give)
    missing = [cell for cell in cells if fresh or not finished(cell)]
    if missing:
        labels = {cell.label for cell in missing}
        _check_methods(missing[0], [one for one in contenders if one.label in labels])
    for cell in missing:
        forget(cell)
    if len(missing) < len(cells):
        console.print(f"{len(cells) - len(missing)} of {len(cells)} runs are finished already, in {folder}")
    watch = _Watch(console, cells, missing, hear)
    stopped = _play(missing, workers, watch)
    runs = tuple(run for cell in cells if (run := finished(cell)))
    comparison = _compared(settings, contenders, seeds, runs, target)
    if stopped:
        where, how = watch.under_way(), again(fresh=fresh)
        console.print(f"stopped{where} with {len(runs)} of {len(cells)} runs finished; {how}")
    try:
        if runs:
            _report(comparison, folder, settings, watch.failed, console, stopped=stopped)
    except KeyboardInterrupt:
        if not stopped:
            console.print(f"stopped in the report; all runs are finished, and {again(fresh=fresh)}")
        raise ToldInterrupt from None
    if stopped:
        raise ToldInterrupt
    if watch.failed:
        raise FleetuneError("; ".join(watch.failed))
    return comparison


def contenders_of(settings: RunSettings, labels: Sequence[str]) -> list[Contender]:
    """Who is compared: a method with the settings that [method] or [compare.LABEL] has for it.

    Raises:
        SettingError: no label, one twice, or one that is neither a method nor a [compare.LABEL].
    """
    if not all(labels) or not labels:
        raise SettingError("--methods: name at least one, e.g. --methods local-only,fedavg,fedspu")
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise SettingError(f"--methods: {twice} stands there twice")
    return [_contender(settings, label) for label in labels]


def labels_of(settings: RunSettings, methods: str | None) -> list[str]:
    """Whom `--methods` means.

    Args:
        settings: of the run file.
        methods: comma-separated labels, or patterns (`kapc*`) of what [compare] has and of methods; `all`:
            every method there is, and what [compare] has; None: the yardsticks, the file's own method, and
            what [compare] has.

    Raises:
        SettingError: a pattern fits nothing.
    """
    if methods not in (None, "all"):
        return _expanded(
            [label.strip() for label in methods.split(",")], [*settings.compare, *sorted(REGISTRY)]
        )
    named = sorted(REGISTRY) if methods else [settings.method["name"]]
    return list(dict.fromkeys([*YARDSTICKS, *named, *settings.compare]))


def _expanded(asked: Sequence[str], known: Sequence[str]) -> list[str]:
    """With every pattern replaced by the known labels that it fits and nobody named before it."""
    labels: list[str] = []
    for label in asked:
        if not set(label) & set("*?["):
            labels.append(label)
            continue
        fitting = list(dict.fromkeys(fnmatch.filter(known, label)))
        if not fitting:
            raise SettingError(f"--methods: nothing fits {label!r}; known: {', '.join(dict.fromkeys(known))}")
        labels += [one for one in fitting if one not in labels]
    return labels


def cells_of(
    settings: RunSettings,
    contenders: Sequence[Contender],
    seeds: int | Sequence[int],
    folder: Path,
    give: Give = _nothing,
) -> list[Cell]:
    """A run for each contender and seed, all contenders with the first seed first."""
    cells = []
    for seed in seeds_of(settings, seeds):
        seeded = replace(settings, run=replace(settings.run, seed=seed), compare={})
        given = give(seeded)
        seeded = given.named_in(seeded)
        for one in contenders:
            played = replace(
                seeded,
                method=with_defaults_of_run(one.method, settings.run.last_round),
                training=with_schedule_of_run(settings.training, settings.run.last_round),
                fleet=settings.fleet if one.ratios is None else replace(settings.fleet, ratios=one.ratios),
                encoding=settings.encoding if one.encoding is None else one.encoding,
                objective=settings.objective if one.objective is None else one.objective,
            )
            kept_in = folder / one.label.replace(":", "-") / f"seed-{seed}"
            cells.append(Cell(one.label, played, kept_in, folder.parent, given))
    return cells


def _play(missing: Sequence[Cell], workers: int, watch: "_Watch") -> bool:
    """Whether it was interrupted."""
    try:
        with watch.bar:
            play_all(missing, workers=workers, on_round=watch.round_done, on_done=watch.run_done)
    except KeyboardInterrupt:
        return True
    return False


def seeds_of(settings: RunSettings, seeds: int | Sequence[int]) -> Sequence[int]:
    """So many from `run.seed` on, or these.

    Raises:
        SettingError: none, or one twice.
    """
    if isinstance(seeds, int):
        if seeds < 1:
            raise SettingError(f"--seeds {seeds}: at least 1")
        return range(settings.run.seed, settings.run.seed + seeds)
    if not seeds or len(set(seeds)) < len(seeds):
        raise SettingError(f"--seeds {list(seeds)}: name at least one, and none twice")
    return seeds


def _check_target(target: float | None, score: Score) -> None:
    if target is not None and score.share and not 0 < target < 1:
        raise SettingError(f"--target {target:g}: {score.title} is between 0 and 1, e.g. 0.9")


def _contender(settings: RunSettings, label: str) -> Contender:
    section, ratios, encoding = _method_section(settings, label), None, None
    if "ratios" in section:
        ratios = convert({"ratios": section.pop("ratios")}, FleetSection, f"compare.{label}").ratios
    if ways := {way: section.pop(way) for way in ("up", "down") if way in section}:
        encoding = convert({"brief": settings.encoding.brief, **ways}, EncodingSection, f"compare.{label}")
    objective = None
    if "minimise" in section:
        wish = {**msgspec.to_builtins(settings.objective), "minimise": section.pop("minimise")}
        objective = convert(wish, ObjectiveSection, f"compare.{label}")
    return Contender(label, section, ratios, encoding, objective)


def _method_section(settings: RunSettings, label: str) -> dict[str, object]:
    own = settings.method if settings.method["name"] == label else {}
    section = {**own, "name": label, **settings.compare.get(label, {})}
    name = section["name"]
    if not isinstance(name, str) or (name not in REGISTRY and ":" not in name):
        known = [*REGISTRY, *settings.compare]
        near = difflib.get_close_matches(str(name), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
        raise SettingError(f"--methods: no method {name!r}; {hint}")
    return section


def _check_methods(cell: Cell, contenders: Sequence[Contender]) -> None:
    """Make each method once: a wrong setting of the last is found before the first has run for hours."""
    from fleetune.coordinator.run.enrolment import prepare
    from fleetune.tools.simulator.runner import with_model_shape
    from fleetune.tools.simulator.simulated_fleet import Shares

    settings = cell.settings
    spec = prepare(with_model_shape(settings, Shares(settings, cell.given)), cell.runs).spec
    for one in contenders:
        try:
            from_section(one.method, spec, settings.task.kind)
        except SettingError as problem:
            raise SettingError(f"{one.label}: {problem}") from None


def _compared(
    settings: RunSettings,
    contenders: Sequence[Contender],
    seeds: Sequence[int],
    runs: tuple[Played, ...],
    target: float | None,
) -> Comparison:
    return Comparison(
        settings.run.name,
        tuple(contenders),
        tuple(seeds),
        runs,
        target_of(runs, target),
    )


def _report(
    comparison: Comparison,
    folder: Path,
    settings: RunSettings,
    failed: Sequence[str],
    console: Console,
    *,
    stopped: bool,
) -> None:
    plots: list[Plot] = []
    files = {
        "methods.csv": methods_csv(comparison),
        "methods.md": markdown(comparison),
        "runs.csv": runs_csv(comparison),
        "rounds.csv": rounds_csv(comparison),
    }
    if inside(comparison.runs):
        files["internals.csv"] = internals_csv(comparison)
    remark = NOT_PAINTED if stopped else "" if can_paint() else NO_PICTURES
    if not remark:
        from fleetune.tools.compare.plots import draw

        plots, pngs = paint(lambda theme: draw(comparison, theme))
        files.update(pngs)
    text = msgspec.json.format(msgspec.json.encode(settings), indent=2).decode()
    page = ComparisonPage(comparison, plots, failed, text, remark)
    files["report.html"] = write_comparison(page)
    for name, data in files.items():
        write_atomically(folder / name, data, durable=False)
    console.print(tables(comparison))
    for name in ("report.html", *(name for name in files if name.endswith((".md", ".csv")))):
        console.print(f"  {folder / name}", soft_wrap=True)


class _Watch:
    """One bar over the rounds of all runs, and a line for each run that is over."""

    def __init__(
        self, console: Console, cells: Sequence[Cell], missing: Sequence[Cell], hear: Hear | None
    ) -> None:
        self._console = console
        self._hear = hear
        self._rounds = {cell.title: 0 for cell in missing}
        self._ended: set[str] = set()
        self._over = len(cells) - len(missing)
        self._num_runs = len(cells)
        self.failed: list[str] = []
        self.bar: Progress = progress_bar(console)
        rounds = [cell.settings.run.last_round for cell in missing]
        total = None if None in rounds else sum(filter(None, rounds))
        self._task: TaskID = self.bar.add_task(self._title(), total=total, score="", visible=bool(missing))

    def round_done(self, news: RoundDone) -> None:
        if self._hear is not None:
            self._hear(news)
        title, most = news.cell.title, news.cell.settings.run.last_round
        self._rounds[title] = max(self._rounds[title], min(news.number, most or news.number))
        told = unit_of(task_of(news.cell.settings.task).score).text(news.score)
        self._update(f"{title} {told}")

    def run_done(self, cell: Cell, problem: FleetuneError | None) -> None:
        self._rounds[cell.title] = cell.settings.run.last_round or self._rounds[cell.title]
        self._over += 1
        self._ended.add(cell.title)
        if problem:
            self.failed.append(f"{cell.title}: {problem}")
            self._console.print(f"[red]{cell.title}: {problem}[/red]")
        elif run := finished(cell):
            score, time_s = PERSONAL_MEAN.of_run(run.summary), DURATION.of_run(run.summary)
            rounds, told = run.summary.rounds, unit_of(run.summary.judged_by).text(score)
            self._console.print(f"{cell.title}: {told} after {rounds} rounds, {duration(time_s)} simulated")
        self._update("")

    def under_way(self) -> str:
        """Which runs are, in words."""
        begun = {title: number for title, number in self._rounds.items() if title not in self._ended}
        rounds = ", ".join(f"{title}, round {number + 1}" for title, number in begun.items() if number)
        return f" in {rounds}" if rounds else ""

    def _title(self) -> str:
        return f"{self._over} of {self._num_runs} runs"

    def _update(self, score: str) -> None:
        self.bar.update(
            self._task,
            description=self._title(),
            completed=sum(self._rounds.values()),
            score=score,
        )
