"""When training pays: devices whose data grow and one day change, trained once a night, on drift, and never.

    python -m fleetune.tools.bench.days examples/streams/drift.toml --seeds 0,1,2 --out FOLDER

The run's [schedule] is played as it is; with `drift = true` in the place of its times; and with no rounds but
the first ones. Each day's score is of what devices serve on the samples that come that day, before they have
them. FOLDER gets days.json, from which a run that was stopped goes on, and days.png; the table is printed.
"""

import argparse
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import msgspec
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from msgspec import UNSET
from msgspec.structs import replace

from fleetune.coordinator.metrics.metric import titled, unit_of
from fleetune.coordinator.metrics.summary import DaySummary
from fleetune.coordinator.reports.pictures.theme import DARK, LIGHT, Theme, blank, label_ends, picture
from fleetune.protocols.files import write_atomically
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.run_toml import read_run
from fleetune.protocols.settings.schedule import ScheduleSection
from fleetune.protocols.tasks import task_of
from fleetune.protocols.tasks.scores import Score
from fleetune.tools.simulator import runner

NIGHTLY, DRIFT, NEVER = "once a night", "when it drifts", "never again"
Played = dict[str, dict[str, list[DaySummary]]]
"""By schedule and seed, the days."""


def scheduled(settings: RunSettings, devices: int) -> dict[str, RunSettings]:
    """The run with each schedule; on drift as soon as so many devices tell of it."""
    first = settings.schedule.first_rounds
    on_drift = ScheduleSection(drift=True, devices=devices, first_rounds=first, zone=settings.schedule.zone)
    return {
        NIGHTLY: settings,
        DRIFT: replace(settings, schedule=on_drift),
        NEVER: replace(settings, run=replace(settings.run, rounds=first, final_evaluation=False)),
    }


def play(settings: RunSettings, workers: int) -> list[DaySummary]:
    """The days of a run."""
    with TemporaryDirectory() as folder:
        run, summary = runner.simulate(settings, Path(folder) / "run", workers=workers, fresh=True)
        run.store.close()
    assert summary.days is not UNSET, "[data.arrivals] says that data grow"
    return summary.days


def spans(settings: RunSettings) -> list[tuple[int, int]]:
    """First and last days before the change, in the days after it, and to the end."""
    arrivals = settings.data.arrivals
    last = int(settings.fleet.days or 0)
    if arrivals is None or arrivals.change is None or arrivals.change.day >= last:
        return [(1, last)]
    changes = arrivals.change.day
    near = min(last, changes + 5)
    return [(1, changes - 1), (changes, near), *([(near + 1, last)] if near < last else [])]


def table(played: Played, settings: RunSettings) -> Iterator[str]:
    """Of each schedule, mean over seeds, as Markdown."""
    unit, parts = unit_of(task_of(settings.task).score), spans(settings)
    heads = [f"days {one} to {other}" for one, other in parts]
    yield f"| trained | {' | '.join(heads)} | rounds | joules | up | down |"
    yield f"|---|{'--:|' * (len(heads) + 4)}"
    for name, seeds in played.items():
        scores = [
            [day.score for days in seeds.values() for day in days if one <= day.day <= other]
            for one, other in parts
        ]
        means = [fmean(score for score in known if score is not None) for known in scores]
        last = [days[-1] for days in seeds.values()]
        cells = [unit.text(one) for one in means]
        cells += [f"{fmean(day.rounds for day in last):.0f}", f"{fmean(day.joules for day in last):,.0f}"]
        cells += [f"{fmean(getattr(day, way) for day in last) / 1e6:,.1f} MB" for way in ("up", "down")]
        yield f"| {name} | {' | '.join(cells)} |"


def alarms(played: Played) -> Iterator[str]:
    """On which days rounds were closed that were begun by drift, seed by seed."""
    for seed, days in played.get(DRIFT, {}).items():
        closed = [0, *(day.rounds for day in days)]
        new = [
            (day.day, after - before) for day, before, after in zip(days, closed, closed[1:], strict=False)
        ]
        words = ", ".join(f"{day}: {rounds}" for day, rounds in new if rounds)
        yield f"seed {seed}, rounds by day: {words}"


def draw(played: Mapping[str, Mapping[str, list[DaySummary]]], settings: RunSettings, theme: Theme) -> Figure:
    """The score by day: a line a schedule, mean over seeds; a band from the least seed to the greatest."""
    score = task_of(settings.task).score
    with rc_context(theme.settings):
        label = f"{score.title}{', %' if score.share else ''}"
        figure, axes = blank(titled(score, "of what devices serve, on each day's new samples"), "day", label)
        colours = dict(zip((NIGHTLY, DRIFT, NEVER), (theme.ours, theme.start, theme.rival), strict=True))
        ends = [_line(axes, name, seeds, score, colours[name]) for name, seeds in played.items()]
        arrivals = settings.data.arrivals
        if arrivals is not None and arrivals.change is not None:
            axes.axvline(arrivals.change.day - 0.5, color=theme.faint, linewidth=1, linestyle=(0, (4, 3)))
        label_ends(axes, ends)
    return figure


def _line(
    axes: Axes, name: str, seeds: Mapping[str, list[DaySummary]], score: Score, colour: str
) -> tuple[float, str, str]:
    """Draw it; its end, for a label."""
    times = unit_of(score).on_axis
    by_day: dict[int, list[float]] = {}
    for days in seeds.values():
        for day in days:
            if day.score is not None:
                by_day.setdefault(day.day, []).append(times * day.score)
    means = [fmean(values) for values in by_day.values()]
    axes.plot(list(by_day), means, color=colour, zorder=3)
    least, greatest = ([of(values) for values in by_day.values()] for of in (min, max))
    axes.fill_between(list(by_day), least, greatest, color=colour, alpha=0.15, linewidth=0)
    return means[-1], name, colour


def _known(path: Path) -> Played:
    return msgspec.json.decode(path.read_bytes(), type=Played) if path.exists() else {}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("run", type=Path)
    options.add_argument("--seeds", default="0")
    options.add_argument("--devices", type=int, default=3, help="that must tell of drift")
    options.add_argument("--workers", type=int, default=0)
    options.add_argument("--out", type=Path, default=Path("days"))
    asked = options.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    settings = read_run(asked.run)
    asked.out.mkdir(parents=True, exist_ok=True)
    kept = asked.out / "days.json"
    played = _known(kept)
    for seed in asked.seeds.split(","):
        seeded = replace(settings, run=replace(settings.run, seed=int(seed)))
        for name, wanted in scheduled(seeded, asked.devices).items():
            if seed not in played.setdefault(name, {}):
                played[name][seed] = play(wanted, asked.workers)
                write_atomically(kept, msgspec.json.encode(played), durable=False, mode=None)
                print(f"seed {seed}, {name}: day {len(played[name][seed])}", flush=True)
    for theme, ending in ((LIGHT, ""), (DARK, "-dark")):
        png = picture(draw(played, settings, theme), theme, "png")
        write_atomically(asked.out / f"days{ending}.png", png, durable=False, mode=None)
    print("\n".join([*table(played, settings), *alarms(played)]))


if __name__ == "__main__":
    main()
