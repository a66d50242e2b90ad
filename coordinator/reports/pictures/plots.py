"""Draws a run's plots: score and bytes by round, score by bytes, and the score of each device."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fleetune.coordinator.metrics import readable
from fleetune.coordinator.metrics.metric import Metric, titled, unit_of
from fleetune.coordinator.metrics.personal_scores import LOCAL, personal
from fleetune.coordinator.metrics.registry import AFTER, BEFORE, BYTES_DOWN, BYTES_UP
from fleetune.coordinator.metrics.summary import Summary
from fleetune.coordinator.reports.pictures import theme
from fleetune.coordinator.reports.pictures.theme import Curve, blank, draw_curves
from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.protocols.tasks.scores import Score

FEDAVG = "fedavg"
_DASHED = (0, (4, 3))
Look = Mapping[str, Any]


@dataclass(frozen=True)
class Story:
    """The data that a run's plots show.

    Attributes:
        summary: summary of the run, with personal scores (`personal_scores.with_personal`).
        records: records of its rounds.
        rivals: summaries of other runs, by method.
    """

    summary: Summary
    records: Sequence[RoundRecord]
    rivals: Mapping[str, Summary] = field(default_factory=dict)

    @property
    def score(self) -> Score:
        """The score by which models are judged."""
        return self.summary.judged_by

    @property
    def training(self) -> list[RoundRecord]:
        """Records of the training rounds."""
        return [record for record in self.records if not record.final_evaluation]

    @property
    def ends(self) -> dict[str, Summary]:
        """Summaries of the rivals and the run that have a personal score, by method."""
        runs = {**self.rivals, self.summary.method: self.summary}
        return {name: one for name, one in runs.items() if one.judged.personal_mean is not None}

    @property
    def looks(self) -> dict[str, Look]:
        """Colour and line style of the run and its rivals, by method."""
        return looks_of([self.summary.method, *self.rivals])


def draw(story: Story) -> dict[str, Figure]:
    """Return the plots that this run has data for, by file name without suffix."""
    with rc_context(theme.SETTINGS):
        drawn = {name: plot(story) for name, plot in _PLOTS.items()}
    return {name: figure for name, figure in drawn.items() if figure is not None}


def looks_of(labels: Sequence[str]) -> dict[str, Look]:
    """Return colour and dashes for each method, as arguments of `Curve`: baselines grey and black, others
    coloured.

    The same label has the same look in all plots of a page. Once all colours are used, lines are dashed.
    """
    looks: dict[str, Look] = {LOCAL: {"colour": theme.RIVAL}, FEDAVG: {"colour": theme.INK}}
    others = [label for label in dict.fromkeys(labels) if label not in looks]
    for index, label in enumerate(others):
        again, place = divmod(index, len(theme.CONTENDERS))
        looks[label] = {
            "colour": theme.CONTENDERS[place],
            "dashes": (0, (5, 1 + again)) if again else "-",
        }
    return looks


def score_plot(score: Score, title: str, x_label: str, curves: Sequence[Curve]) -> Figure | None:
    """Return a plot of a score; None without curves.

    Args:
        score: the score.
        title: the rest of the title, after the score's name.
        x_label: label of the horizontal axis.
        curves: curves with values of the score; a score that is a share is in percent.
    """
    if not curves:
        return None
    height_in = max(3.6, 1.2 + 0.24 * len(curves))
    figure, axes = blank(titled(score, title), x_label, AFTER.for_score(score).axis, height_in=height_in)
    draw_curves(axes, curves, percent=score.share)
    return figure


def end_label(score: Score, value: float, name: str) -> str:
    """Return the label at a curve's end: its last value as on the axis, and its name."""
    return f"{value:{'.1f' if score.share else '.3g'}}  {readable.clip(name)}"


def devices_plot(
    score: Score, by_label: Mapping[str, Sequence[float]], looks: Mapping[str, Look]
) -> Figure | None:
    """Return a plot of all devices' sorted personal scores, one curve for each label; None without scores.

    Args:
        score: the score.
        by_label: the scores of the devices by the label of their run or configuration.
        looks: see `looks_of`.
    """
    times, curves = unit_of(score).on_axis, []
    for label, values in by_label.items():
        ranked = [times * value for value in sorted(values, reverse=score.better == "lower")]
        if ranked:
            places = [100 * (index + 0.5) / len(ranked) for index in range(len(ranked))]
            name = end_label(score, median(ranked), label)
            curves.append(Curve(name, ranked, places, **looks[label]))
    return score_plot(score, "of each device; at the right: median", "devices, the worst first, %", curves)


def _by_round(story: Story) -> Figure | None:
    """Plot the mean score of each round's participants, before and after local training; rivals as levels."""
    curves, score = [], story.score
    for metric, colour, name in (BEFORE, theme.START, "before"), (AFTER, theme.OURS, "after"):
        rounds, values = _history(story, metric)
        if values:
            curves.append(Curve(end_label(score, values[-1], name), values, rounds, colour))
    for name, summary in story.ends.items() if curves else ():
        if name != story.summary.method:
            level = unit_of(score).on_axis * (summary.judged.personal_mean or 0.0)
            curves.append(Curve(end_label(score, level, name), [level], **story.looks[name]))
    figure = score_plot(score, "by round", "round", curves)
    if figure:
        figure.axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _by_uplink(story: Story) -> Figure | None:
    """Plot the mean score after local training against all bytes sent up so far, with a dot at each run's
    end.
    """
    score, method = story.score, story.summary.method
    sent, total, before = [], 0.0, 0
    for record in story.training:
        # a record of an open run also stands for the dropped rounds before it
        total += (BYTES_UP.of_round(record) or 0) * (record.number - before)
        before = record.number
        sent.append((total, AFTER.of_round(record)))
    known = [(up, value) for up, value in sent if value is not None]
    if not known or method not in story.ends:
        return None
    times = unit_of(score).on_axis
    scale = readable.byte_scale(max([up for up, _ in known] + [one.bytes.up for one in story.ends.values()]))
    curves = []
    for name, summary in story.ends.items():
        level = times * (summary.judged.personal_mean or 0.0)
        points = [*known, (summary.bytes.up, None)] if name == method else [(summary.bytes.up, None)]
        x = [up / 1000**scale for up, _ in points]
        y = [level if value is None else times * value for _, value in points]
        curves.append(Curve(end_label(score, level, name), y, x, **story.looks[name]))
    label = f"sent up by all devices, {readable.byte_unit(scale)}"
    return score_plot(score, "by bytes sent", label, curves)


def _by_device(story: Story) -> Figure | None:
    """Plot the personal score of each device, for the run and its rivals."""
    runs = {**story.rivals, story.summary.method: story.summary}
    values = {name: list(personal(one).values()) for name, one in runs.items()}
    return devices_plot(story.score, values, story.looks)


def _bytes_by_round(story: Story) -> Figure | None:
    """Plot the payload bytes of each round's replies and tasks, compared with whole models."""
    training, summary = story.training, story.summary
    if not training:
        return None
    dense = [float(4 * summary.parameters * len(record.devices)) for record in training]
    up, down = ([one.of_round(record) or 0.0 for record in training] for one in (BYTES_UP, BYTES_DOWN))
    scale = readable.byte_scale(max(*dense, *up, *down))
    figure, axes = blank("Bytes by round", "round", f"payload, {readable.byte_unit(scale)} a round")
    rounds = [record.number for record in training]
    axes.set_ylim(0, 1.08 * max(dense + up + down) / 1000**scale or 1)
    curves = [
        Curve(label, [value / 1000**scale for value in values], rounds, colour, dashes)
        for values, colour, label, dashes in (
            (dense, theme.RIVAL, "whole models", _DASHED),
            (up, theme.UP, f"up {readable.percent(summary.bytes.share_up)}", "-"),
            (down, theme.DOWN, f"down {readable.percent(summary.bytes.share_down)}", "-"),
        )
    ]
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    draw_curves(axes, curves)
    return figure


_PLOTS: dict[str, Callable[[Story], Figure | None]] = {
    "accuracy-by-round": _by_round,
    "accuracy-by-uplink": _by_uplink,
    "accuracy-by-device": _by_device,
    "bytes-by-round": _bytes_by_round,
}


def _history(story: Story, metric: Metric) -> tuple[list[float], list[float]]:
    """Return the numbers of the training rounds that have this metric, and its values as on the axis."""
    means = [(record.number, metric.of_round(record)) for record in story.training]
    known = [(number, value) for number, value in means if value is not None]
    times = unit_of(story.score).on_axis
    return [float(number) for number, _ in known], [times * value for _, value in known]
