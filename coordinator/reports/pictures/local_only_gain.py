"""Picture of devices' gains over local-only training: one dot for each device with its interval, sorted."""

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from msgspec import UNSET

from fleetune.coordinator.metrics import readable
from fleetune.coordinator.metrics.metric import gain_of, unit_of
from fleetune.coordinator.metrics.summary import ONE_SIDED_95, DeviceAdoption, Summary
from fleetune.coordinator.reports.pictures.theme import Theme, blank, name_above
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.tasks.scores import Score

MOST_NAMED = 30


def gain_over_local_only(summary: Summary, theme: Theme) -> Figure | None:
    """Gains with their 95 % intervals, for a share in percentage points; None if no device reported a
    gain.
    """
    score = summary.judged_by
    reported = {
        device: row.adoption
        for device, row in summary.by_device.items()
        if row.adoption is not UNSET and _is_drawable(row.adoption, score)
    }
    if not reported or summary.adoption is UNSET:
        return None
    order = sorted(reported, key=lambda device: (reported[device].gain or 0.0, device))
    named = len(order) <= MOST_NAMED
    height_in = 1.65 + (0.3 * len(order) if named else 3.2)
    label = "points over local-only" if score.share else f"better than local-only, {score.title}"
    figure, axes = blank("", label, "", height_in=height_in)
    axes.axvline(0, color=theme.faint, linewidth=1)
    _mark_mean(axes, summary, theme)
    for adopted, colour, label in (
        (True, theme.ours, "the fleet's model"),
        (False, theme.rival, "local-only"),
    ):
        _dots(
            axes,
            reported,
            [(at, one) for at, one in enumerate(order) if reported[one].adopted == adopted],
            colour,
            label,
            unit_of(score).on_axis,
        )
    axes.set_ylim(-0.6, len(order) - 0.4)
    axes.set_yticks(
        range(len(order)) if named else [], [readable.clip(one) for one in order] if named else []
    )
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    name_above(axes, _title(summary))
    return figure


def _dots(
    axes: Axes,
    reported: Mapping[DeviceId, DeviceAdoption],
    places: list[tuple[int, DeviceId]],
    colour: str,
    label: str,
    times: float,
) -> None:
    if not places:
        return
    heights = [at for at, _ in places]
    gains = [times * (reported[device].gain or 0.0) for _, device in places]
    reach = [times * ONE_SIDED_95 * (reported[device].gain_error or 0.0) for _, device in places]
    axes.errorbar(
        gains, heights, xerr=reach, fmt="o", color=colour, label=label, markersize=7, elinewidth=1.6, zorder=3
    )


def _mark_mean(axes: Axes, summary: Summary, theme: Theme) -> None:
    found = summary.adoption
    if found is UNSET or found.gain is None:
        return
    times = unit_of(summary.judged_by).on_axis
    if found.low is not None and found.high is not None:
        axes.axvspan(times * found.low, times * found.high, color=theme.grid, zorder=1)
    axes.axvline(times * found.gain, color=theme.ours, linewidth=1.2, linestyle=(0, (4, 3)), zorder=2)


def _title(summary: Summary) -> str:
    found = summary.adoption
    assert found is not UNSET, "devices report it"
    mean = (
        ""
        if found.gain is None
        else f", {gain_of(summary.judged_by).text(found.gain)} over local-only in the mean"
    )
    return f"{found.adopted} of {found.devices} devices deploy the fleet's model{mean}"


def _is_drawable(one: DeviceAdoption, score: Score) -> bool:
    """True if the gain is within the score's possible range; larger claims would squeeze all other dots."""
    low, high = score.bounds
    return one.gain is not None and max(abs(one.gain), one.gain_error or 0.0) <= high - low
