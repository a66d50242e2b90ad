"""The results of the benchmark: results.json, results.md, and a picture."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.ratios.matrix import Group
from benchmarks.ratios.verdicts import FIGURES, Verdict
from fleetune.coordinator.reports.pictures import theme
from fleetune.protocols.files import write_atomically
from fleetune.tools.compare.sheets import markdown_table

Found = Mapping[Group, Sequence[Verdict]]

_NEVER = "never"
_HEAD = ("", "seconds", "joules", "MB up", "score in the end", "run lasts", "devices", "late replies")
_FIGURE_WORDS = {"seconds": "sooner", "joules": "fewer joules", "megabytes": "fewer bytes up"}
_ROW_IN, _HEAD_IN, _WIDTH_IN = 0.34, 1.6, 8.2
_LEFT = 0.8  # start of the axis, relative to the smallest drawn value


def write_results(found: Found, folder: Path) -> str:
    """Write all files and return the tables."""
    text = "\n".join(markdown(group, some) for group, some in found.items())
    plain = [
        {"fleet": group.fleet, "method": group.method, "candidates": [_plain(one) for one in some]}
        for group, some in found.items()
    ]
    write_atomically(folder / "results.json", json.dumps(plain, indent=1).encode(), mode=None)
    write_atomically(folder / "results.md", text.encode(), mode=None)
    figure = picture(found)
    if figure is not None:
        figure.savefig(folder / "results.png", dpi=150)
    return text


def _plain(one: Verdict) -> dict[str, Any]:
    runs = [asdict(outcome) for outcome in one.outcomes]
    return {
        "candidate": one.candidate.words,
        "fixed": one.candidate.is_fixed,
        "runs": runs,
        "times": dict(one.times),
    }


def markdown(group: Group, some: Sequence[Verdict]) -> str:
    """The table of one method in one fleet: medians over seeds.

    In brackets is the saving factor over the best fixed candidate, from the worst seed to the best.
    """
    outcomes = [outcome for one in some for outcome in one.outcomes]
    targets = sorted({outcome.target for outcome in outcomes})
    seeds = sorted({outcome.seed for outcome in outcomes})
    wanted = " to ".join(f"{100 * one:.1f}" for one in dict.fromkeys((targets[0], targets[-1])))
    seeds_text = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
    title = f"**{group.fleet}, {group.method}**, to {wanted} %, {seeds_text}"
    lines = [title, "", *markdown_table(_HEAD, map(_cells, some))]
    return "\n".join(lines) + "\n"


def _cells(one: Verdict) -> list[str]:
    own = one.outcomes
    ends = sorted(100 * outcome.score for outcome in own)
    return [
        f"p = {one.candidate.words}"
        if one.candidate.ratio and one.candidate.words[0].isdigit()
        else f"`{one.candidate.words}`",
        *(_taken(one, figure) for figure in FIGURES),
        f"{_between(ends, '{:.1f}'.format)} %",
        f"{median(outcome.lasted_s for outcome in own):,.0f} s",
        _between(sorted(float(outcome.num_devices) for outcome in own), "{:.0f}".format),
        f"{100 * max(outcome.late for outcome in own):.1f} %",
    ]


def _taken(one: Verdict, figure: str) -> str:
    taken = [value for outcome in one.outcomes if (value := outcome.taken(figure)) is not None]
    if not taken:
        return _NEVER
    text = _in_short(median(taken))
    if len(taken) < len(one.outcomes):
        text = f"{text}, {len(taken)} of {len(one.outcomes)}"
    times = sorted(value for value in one.times[figure] if value is not None)
    return text if one.candidate.is_fixed or not times else f"{text} ({_between(times, _as_factor)}x)"


def _between(values: Sequence[float], in_words: Callable[[float], str]) -> str:
    """The minimum and the maximum as text, once if their texts are equal."""
    return " to ".join(dict.fromkeys(map(in_words, (values[0], values[-1]))))


def _as_factor(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _in_short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def picture(found: Found) -> Figure | None:
    """Saving factors over the best fixed candidate: a row for each group and objective, a dot for each seed.

    A cross at the left edge is a seed that never reached the target.
    """
    rows = {
        f"{group.method}, {group.fleet}: {one.candidate.words}": one
        for group, some in found.items()
        for one in some
        if not one.candidate.is_fixed
    }
    if not rows:
        return None
    with rc_context(theme.SETTINGS):
        figure = Figure(figsize=(_WIDTH_IN, _HEAD_IN + _ROW_IN * len(rows)), layout="constrained")
        axes = figure.add_subplot()
        colours = dict(zip(FIGURES, (theme.OURS, theme.START, theme.UP), strict=True))
        for name in dict.fromkeys(one.judged_by for one in rows.values()):
            axes.plot([], [], "o", color=colours[name], label=_FIGURE_WORDS[name])
        _draw_rows(axes, list(rows.values()), colours)
        axes.set_yticks(range(len(rows)), list(rows))
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.axvline(1, color=theme.FAINT, linewidth=1)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
        axes.set_title("Against the best fixed ratio")
        axes.set_xlabel("times less until the target; a dot a seed, a cross: never there")
        figure.legend(loc="outside upper right", ncols=len(FIGURES))
    return figure


def _draw_rows(axes: Axes, rows: Sequence[Verdict], colours: Mapping[str, str]) -> None:
    known = [value for one in rows for value in one.times[one.judged_by] if value is not None]
    edge = _LEFT * min([1.0, *known])
    for place, one in enumerate(rows):
        colour, times = colours[one.judged_by], one.times[one.judged_by]
        there = [value for value in times if value is not None]
        never = [edge] * (len(times) - len(there))
        axes.plot(there, [place] * len(there), "o", color=colour, clip_on=False)
        axes.plot(never, [place] * len(never), "x", color=colour, clip_on=False)
    axes.set_xscale("log")
    axes.set_xlim(left=edge)
