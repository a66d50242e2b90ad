"""A method's figures on the report's page: what each is, where it began and ended, and its picture."""

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from fleetune.coordinator.metrics.personal_scores import Column
from fleetune.coordinator.metrics.summary import DiagnosticHistory, Summary
from fleetune.coordinator.reports.diagnostics.entries import PICTURE, PREFIX, metrics_in, sentence, unit_of
from fleetune.coordinator.reports.diagnostics.words import between
from fleetune.coordinator.reports.markup import Plot, element, figure, row, table

_ABOUT = (
    "What the method tells of its own mechanisms, round by round: does each act? Of the devices' updates it "
    "is a round's mean; of the coordinator, its state after it. Of figures with parts the range is shown."
)
_HEADS = ["figure", "at first", "last", "over the run", "what it is"]


def section(summary: Summary, plots: Sequence[Plot]) -> list[Element]:
    """The section "Diagnostics of the method"; nothing where it tells nothing."""
    if not summary.diagnostics_by_name:
        return []
    pictures = {plot.name.removeprefix(PICTURE): plot for plot in plots if plot.name.startswith(PICTURE)}
    shown = [
        figure(pictures[name], f"{sentence(one.about)} {_read(one)}".strip())
        for name, one in summary.diagnostics_by_name.items()
        if name in pictures
    ]
    return [
        element("h2", "Diagnostics of the method"),
        element("p", _ABOUT, class_="faint"),
        diagnostics_section_table(summary),
        *([element("p"), element("div", *shown, class_="plots")] if shown else []),
    ]


def device_columns(summary: Summary) -> list[Column]:
    """Of the figures of updates without parts: means over each device's rounds."""
    plain = {
        f"{PREFIX}{name}"
        for name, one in summary.diagnostics_by_name.items()
        if one.of == "update" and not one.by
    }
    return [Column(one.title, (one,)) for one in metrics_in([summary]) if one.name in plain]


def diagnostics_section_table(summary: Summary) -> Element:
    """A row a figure."""
    rows = [
        row([*cells(one), element("td", sentence(one.about), class_="prose")])
        for one in summary.diagnostics_by_name.values()
    ]
    return table(_HEADS, rows, left=_HEADS[-1:])


def cells(course: DiagnosticHistory) -> list[str]:
    """Its title, how it was told first and last, and between which values it lay."""
    text = unit_of(course.unit).text
    ends = [text(course.mean[0]), text(course.mean[-1])]
    if course.parts:
        ends = [_over_parts(course, 0), _over_parts(course, -1)]
    title = f"{course.title} by {course.by}" if course.parts else course.title
    return [title, *ends, between(min(course.least), max(course.greatest), course.unit)]


def _over_parts(course: DiagnosticHistory, at: int) -> str:
    values = [one for values in course.parts.values() if (one := values[at]) is not None]
    return between(min(values), max(values), course.unit)


def _read(course: DiagnosticHistory) -> str:
    """How its picture is read."""
    if course.parts:
        return "At the right: the last values."
    return "Band: from the least device to the greatest." if course.of == "update" else ""
