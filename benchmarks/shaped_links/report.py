"""Tables and a picture of simulated and real runs."""

from collections.abc import Callable, Iterable
from statistics import median
from typing import Self

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from msgspec import Struct
from msgspec.structs import replace
from rich.table import Table

from benchmarks.shaped_links.trajectories import Trajectory
from fleetune.coordinator.metrics import readable
from fleetune.coordinator.metrics.metric import titled, unit_of
from fleetune.coordinator.reports.pictures import theme
from fleetune.coordinator.reports.pictures.theme import blank, label_ends
from fleetune.protocols.tasks.scores import Score


class Configuration(Struct, frozen=True):
    """A configuration of the fleet with its runs.

    Attributes:
        changes: `section.key=value` on top of the run.toml.
        predicted: the simulated run.
        actual: the real runs, one for each repeat.
    """

    changes: list[str]
    predicted: Trajectory
    actual: list[Trajectory] = []


class Shaped(Struct, frozen=True):
    """All results, as in the JSON file.

    Attributes:
        run: name of the run.
        target: score of `seconds_to_target`.
        gflops: speed of each device in the calibration run.
        jitter: variation from round to round in the calibration run.
        links: description of each device's link.
        configurations: configurations by name.
    """

    run: str
    target: float
    gflops: dict[str, float]
    jitter: float
    links: dict[str, str]
    configurations: dict[str, Configuration]
    seconds_to_target: dict[str, list[float | None]] = {}

    def with_seconds(self) -> Self:
        """Add the seconds of each configuration to the target: simulated first, then real."""
        reached = {
            name: [one.seconds_to(self.target) for one in (configuration.predicted, *configuration.actual)]
            for name, configuration in self.configurations.items()
        }
        return replace(self, seconds_to_target=reached)


Of = Callable[[Trajectory], float | None]


def table(found: Shaped, score: Score) -> Table:
    """Table of predicted and actual values (median repeat) and their ratio."""
    target = unit_of(score).text(found.target)
    columns: dict[str, tuple[Of, Callable[[float | None], str]]] = {
        f"seconds to {target}": (lambda one: one.seconds_to(found.target), _to(1)),
        f"joules to {target}": (lambda one: one.joules_to(found.target), _to(0)),
        "seconds a round": (lambda one: one.round_s, _to(2)),
        "seconds in all": (lambda one: one.seconds, _to(1)),
        "up": (lambda one: float(one.bytes_up), readable.size),
        "late": (lambda one: float(one.late), readable.number),
    }
    shown = Table(title=f"{found.run}: simulated / real (times)", box=None, header_style="bold")
    shown.add_column("configuration")
    for title in columns:
        shown.add_column(title, justify="right")
    for name, configuration in found.configurations.items():
        shown.add_row(name, *(_cell(configuration, of, text) for of, text in columns.values()))
    return shown


def parts_table(found: Shaped) -> Table:
    """Table of the parts of a round of its slowest device: simulated / real, medians."""
    shown = Table(title="a round of its slowest device, ms: simulated / real", box=None, header_style="bold")
    for title in ("configuration", "download", "train", "upload", "rest"):
        shown.add_column(title, justify="left" if title == "configuration" else "right")
    for name, configuration in found.configurations.items():
        sides = configuration.predicted.parts, [one.parts for one in configuration.actual if one.parts]
        if sides[0] is None or not sides[1]:
            continue
        cells = []
        for key in ("download", "train", "upload", "rest"):
            real = median(getattr(one, key) for one in sides[1])
            cells.append(f"{1e3 * getattr(sides[0], key):.0f} / {1e3 * real:.0f}")
        shown.add_row(name, *cells)
    return shown


def _cell(configuration: Configuration, of: Of, text: Callable[[float | None], str]) -> str:
    predicted, actual = of(configuration.predicted), typical(of(one) for one in configuration.actual)
    times = f" ({actual / predicted:.2f})" if actual is not None and predicted else ""
    return f"{text(predicted)} / {text(actual)}{times}"


def typical(values: Iterable[float | None]) -> float | None:
    """Median of the values; None if half of them or more are missing."""
    listed = list(values)
    there = [value for value in listed if value is not None]
    return median(there) if 2 * len(there) > len(listed) else None


def _to(digits: int) -> Callable[[float | None], str]:
    """Return a formatter with this number of decimals."""
    return lambda number: readable.UNKNOWN if number is None else f"{number:.{digits}f}"


def draw(found: Shaped, score: Score) -> Figure:
    """Draw the score over seconds: simulated runs dashed, real runs solid."""
    times = unit_of(score).on_axis
    with rc_context(theme.SETTINGS):
        label = f"{score.title}{', %' if score.share else ''}"
        title = titled(score, "simulated (dashed) and real (solid)")
        figure, axes = blank(title, "seconds since the first round opened", label)
        ends = []
        for (name, each), colour in zip(found.configurations.items(), theme.CONTENDERS, strict=False):
            for one, dashes in [(each.predicted, (0, (4, 2))), *((real, "-") for real in each.actual)]:
                at_s, scores = zip(*one.points, strict=True)
                axes.plot(at_s, times * np.array(scores), color=colour, linestyle=dashes, linewidth=1.5)
            last = each.actual[-1] if each.actual else each.predicted
            ends.append((times * last.points[-1][1], name, colour))
        axes.set_xlim(left=0)
        label_ends(axes, ends)
    return figure
