"""A run's plots: score and bytes by round and device, gains and predictions of each device."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from fleetune.coordinator.metrics import readable
from fleetune.coordinator.metrics.metric import Metric, titled, unit_of
from fleetune.coordinator.metrics.personal_scores import baseline, better_by, gains, personal
from fleetune.coordinator.metrics.predicted_cost import pairs_of
from fleetune.coordinator.metrics.registry import AFTER, BEFORE, BYTES_DOWN, BYTES_UP, DURATION
from fleetune.coordinator.metrics.summary import Summary
from fleetune.coordinator.reports.pictures.diagnostics import diagnostic_pictures
from fleetune.coordinator.reports.pictures.local_only_gain import gain_over_local_only
from fleetune.coordinator.reports.pictures.predicted_cost import seconds_scatter
from fleetune.coordinator.reports.pictures.theme import Theme, blank, label_ends, name_above
from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.tasks.scores import Score

MAX_NAMED = 30


@dataclass(frozen=True)
class Story:
    """Data for the plots.

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

    def axis(self, metric: Metric) -> str:
        """Label of an axis for a metric of the score."""
        return metric.for_score(self.score).axis

    def title(self, rest: str) -> str:
        """Title of a picture of the score."""
        return titled(self.score, rest)

    def placed(self, value: float) -> float:
        """Position of a score's value on an axis."""
        return unit_of(self.score).on_axis * value

    def text(self, placed: float) -> str:
        """The value at a position on an axis, as text."""
        unit = unit_of(self.score)
        return unit.text(placed / unit.on_axis)

    def limit(self, axes: Axes) -> None:
        """Limit the axis of a share to the range from 0 to 1."""
        if self.score.share:
            low, high = axes.get_ylim()
            axes.set_ylim(max(low, -2.0), min(high, 102.0))

    @property
    def training(self) -> list[RoundRecord]:
        return [record for record in self.records if not record.final_evaluation]


@dataclass(frozen=True)
class _Label:
    """Text and style of a dot's label."""

    content: str
    colour: str
    weight: Literal["bold", "normal"]
    ground: str


def draw(story: Story, theme: Theme) -> dict[str, Figure]:
    """The plots that this run has data for, by file name without suffix."""
    with rc_context(theme.settings):
        drawn = {name: plot(story, theme) for name, plot in _PLOTS.items()}
    known = {name: figure for name, figure in drawn.items() if figure is not None}
    return {**known, **diagnostic_pictures(story.summary, theme)}


def accuracy_by_round(story: Story, theme: Theme) -> Figure | None:
    """Mean over each round's participants, before and after local training; rivals as levels."""
    before, after = _curve(story, BEFORE), _curve(story, AFTER)
    if not after:
        return None
    figure, axes = blank(story.title("by round"), "round", story.axis(AFTER))
    labels = []
    for curve, colour, text in (before, theme.start, "before"), (after, theme.ours, "after"):
        if curve:
            axes.plot(*zip(*curve, strict=True), color=colour, marker=_marker(curve), zorder=3)
            labels.append((curve[-1][1], f"{text}\n{story.text(curve[-1][1])}", colour))
    for name, summary in story.rivals.items():
        level = summary.judged.personal_mean
        if level is not None:
            height = story.placed(level)
            axes.axhline(height, color=theme.rival, linestyle=(0, (4, 3)), linewidth=1.2)
            labels.append((height, f"{readable.clip(name)}\n{story.text(height)}", theme.rival))
    story.limit(axes)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    label_ends(axes, labels, lines=2)
    return figure


def accuracy_by_uplink(story: Story, theme: Theme) -> Figure | None:
    """Mean accuracy after local training against all bytes sent up so far; whole runs as dots."""
    curve, sent, before = [], 0.0, 0
    for record in story.training:
        sent += (BYTES_UP.of_round(record) or 0) * (record.number - before)  # it stands for those let go of
        before = record.number
        accuracy = AFTER.of_round(record)
        if accuracy is not None:
            curve.append((sent, story.placed(accuracy)))
    ends = [
        (summary.bytes.up, story.placed(summary.judged.personal_mean), name, colour)
        for name, summary, colour in _all_runs(story, theme)
        if summary.judged.personal_mean is not None
    ]
    if not curve or story.summary.judged.personal_mean is None:
        return None
    farthest = max([x for x, _ in curve] + [x for x, _, _, _ in ends])
    scale = readable.byte_scale(farthest)
    figure, axes = blank(
        story.title("by bytes sent"),
        f"sent up by all devices, {readable.byte_unit(scale)}",
        story.axis(AFTER),
    )
    axes.plot(*zip(*((x / 1000**scale, y) for x, y in curve), strict=True), color=theme.ours, alpha=0.55)
    axes.set_xlim(-0.03 * farthest / 1000**scale, 1.06 * farthest / 1000**scale)
    heights = [y for _, y in curve] + [y for _, y, _, _ in ends]
    clearly_lower = ends[-1][1] - 0.1 * (max(heights) - min(heights))  # than the run, the last of the ends
    for x, y, name, colour in ends:
        ours = colour == theme.ours
        above = y >= clearly_lower and not ours
        text = _Label(
            f"{readable.clip(name)} {story.text(y)}", colour, "bold" if ours else "normal", theme.ground
        )
        _dot(axes, (x / 1000**scale, y), text, leftwards=x > 0.7 * farthest, above=above)
    story.limit(axes)
    return figure


def bytes_by_round(story: Story, theme: Theme) -> Figure | None:
    """Payload bytes of each round's replies and tasks, compared with whole models."""
    training, parameters = story.training, story.summary.parameters
    if not training:
        return None
    dense = [4 * parameters * len(record.devices) for record in training]
    up, down = ([one.of_round(record) or 0 for record in training] for one in (BYTES_UP, BYTES_DOWN))
    scale = readable.byte_scale(max(*dense, *up, *down))
    figure, axes = blank("Bytes by round", "round", f"payload, {readable.byte_unit(scale)} a round")
    rounds = [record.number for record in training]
    labels = []
    for values, colour, text, dashes in (
        (dense, theme.rival, "whole models", (0, (4, 3))),
        (up, theme.up, f"up\n{readable.percent(story.summary.bytes.share_up)}", "-"),
        (down, theme.down, f"down\n{readable.percent(story.summary.bytes.share_down)}", "-"),
    ):
        scaled = [value / 1000**scale for value in values]
        marker = _marker(rounds) if dashes == "-" else ""
        axes.plot(rounds, scaled, color=colour, linestyle=dashes, marker=marker, zorder=3)
        labels.append((scaled[-1], text.replace(" ", "\n", 1) if text.startswith("whole") else text, colour))
    axes.set_ylim(0, 1.08 * max(dense + up + down) / 1000**scale or 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    label_ends(axes, labels, lines=2)
    return figure


def accuracy_by_device(story: Story, theme: Theme) -> Figure | None:
    """Personal accuracy of each device for the run and the rival; for many devices, sorted curves."""
    ours, rival = personal(story.summary), baseline(story.rivals)
    if not ours:
        return None
    theirs = personal(story.rivals[rival]) if rival else {}
    if len(ours) > MAX_NAMED:
        return _sorted_accuracies(story, theme, ours, rival, theirs)
    sign = better_by(story.score)
    devices = sorted(ours, key=lambda device: (sign * ours[device], device))
    title = story.title("by device")
    figure, axes = _by_name(title, devices, story.axis(AFTER), room_in=0.35 if rival else 0.0)
    for height, device in enumerate(devices):
        if device in theirs:
            span = [story.placed(theirs[device]), story.placed(ours[device])]
            axes.plot(span, [height, height], color=theme.grid, linewidth=4, solid_capstyle="butt")
    shared = [device for device in devices if device in theirs]
    if rival and shared:
        heights = [devices.index(device) for device in shared]
        axes.plot(
            [story.placed(theirs[d]) for d in shared],
            heights,
            "o",
            color=theme.rival,
            label=readable.clip(rival),
            markersize=8,
        )
    values = [story.placed(ours[device]) for device in devices]
    axes.plot(values, range(len(devices)), "o", color=theme.ours, label=story.summary.method, markersize=8)
    if story.score.share:
        axes.set_xlim(right=min(axes.get_xlim()[1], 102.0))
    if rival:
        name_above(axes, title)
    return figure


def gain_by_device(story: Story, theme: Theme) -> Figure | None:
    """Gain in personal accuracy over the rival in percentage points, largest first."""
    rival = baseline(story.rivals)
    gained = gains(story.summary, story.rivals[rival]) if rival else {}
    if not gained:
        return None
    title = f"{sum(gain > 0 for gain in gained.values())} of {len(gained)} devices gained over {rival}"
    title += f" (median {unit_of(story.score).gain(median(gained.values()))})"
    devices = sorted(gained, key=lambda device: (gained[device], device))
    values = [story.placed(gained[device]) for device in devices]
    name = f"points of {story.score.title}" if story.score.share else f"better by, {story.score.title}"
    if len(devices) > MAX_NAMED:
        figure, axes = blank(title, "devices, the largest gain first", name)
        places, values = range(1, len(values) + 1), values[::-1]
        for sign, colour in (1, theme.ours), (-1, theme.start):
            part = [value if sign * value > 0 else 0.0 for value in values]
            axes.fill_between(places, part, step="mid", color=colour, linewidth=0)
        axes.axhline(0, color=theme.faint, linewidth=1)
        axes.set_xlim(0.5, len(values) + 0.5)
        return figure
    figure, axes = _by_name(title, devices, name)
    colours = [theme.ours if value >= 0 else theme.start for value in values]
    bars = axes.barh(range(len(values)), values, height=0.62, color=colours)
    axes.bar_label(
        bars,
        [f"{value:+.1f}" if story.score.share else f"{value:+.3g}" for value in values],
        padding=4,
        color=theme.ink,
    )
    axes.axvline(0, color=theme.faint, linewidth=1)
    axes.margins(x=0.18)
    return figure


_PLOTS: dict[str, Callable[[Story, Theme], Figure | None]] = {
    "accuracy-by-round": accuracy_by_round,
    "accuracy-by-uplink": accuracy_by_uplink,
    "gain-by-device": gain_by_device,
    "gain-over-local-only": lambda story, theme: gain_over_local_only(story.summary, theme),
    "accuracy-by-device": accuracy_by_device,
    "bytes-by-round": bytes_by_round,
    "predicted-by-actual": lambda story, theme: seconds_scatter(pairs_of(story.records, DURATION), theme),
}


def _curve(story: Story, metric: Metric) -> list[tuple[int, float]]:
    means = [(record.number, metric.of_round(record)) for record in story.training]
    return [(number, story.placed(value)) for number, value in means if value is not None]


def _marker(points: Sequence[object]) -> str:
    return "o" if len(points) <= 15 else ""


def _all_runs(story: Story, theme: Theme) -> list[tuple[str, Summary, str]]:
    rivals = [(name, summary, theme.rival) for name, summary in story.rivals.items()]
    return [*rivals, (story.summary.method, story.summary, theme.ours)]


def _dot(axes: Axes, place: tuple[float, float], label: _Label, *, leftwards: bool, above: bool) -> None:
    """Draw a dot and its label; an outline in the background colour keeps the label legible on lines."""
    axes.plot(*place, "o", color=label.colour, markersize=9, zorder=4, clip_on=False)
    axes.annotate(
        label.content,
        place,
        xytext=(6 if leftwards else -6, 14 if above else -16),
        textcoords="offset points",
        ha="right" if leftwards else "left",
        va="center",
        color=label.colour,
        weight=label.weight,
        path_effects=[withStroke(linewidth=4, foreground=label.ground)],
        zorder=5,
    )


def _by_name(
    title: str, devices: Sequence[DeviceId], x_label: str, room_in: float = 0.0
) -> tuple[Figure, Axes]:
    figure, axes = blank(title, x_label, "", height_in=1.3 + room_in + 0.3 * len(devices))
    axes.set_yticks(range(len(devices)), [readable.clip(device) for device in devices])
    axes.set_ylim(-0.6, len(devices) - 0.4)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    return figure, axes


def _sorted_accuracies(
    story: Story, theme: Theme, ours: dict[DeviceId, float], rival: str | None, theirs: dict[DeviceId, float]
) -> Figure:
    figure, axes = blank(story.title("by device"), "devices, the worst first", story.axis(AFTER))
    curves = [(story.summary.method, ours, theme.ours), (rival or "", theirs, theme.rival)]
    labels = []
    for name, values, colour in curves:
        if values:
            worst_first = sorted(values.values(), reverse=story.score.better == "lower")
            ranked = [story.placed(value) for value in worst_first]
            places = [100 * (index + 0.5) / len(ranked) for index in range(len(ranked))]
            axes.plot(places, ranked, color=colour, zorder=3 if values is ours else 2)
            labels.append((ranked[-1], f"{readable.clip(name)}\nmedian {story.text(median(ranked))}", colour))
    axes.set_xlabel(f"share of the {len(ours)} devices, the worst first, %")
    axes.set_xlim(0, 100)
    story.limit(axes)
    label_ends(axes, labels, lines=2)
    return figure
