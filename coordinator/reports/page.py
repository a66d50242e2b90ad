"""report.html: one file that says all about a run, readable offline, on a phone, by day and by night."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from xml.etree.ElementTree import Element

from msgspec import UNSET

from fleetune.coordinator.metrics import readable
from fleetune.coordinator.metrics.adoption_words import adoption_words
from fleetune.coordinator.metrics.metric import Metric, Place, unit_of
from fleetune.coordinator.metrics.personal_scores import (
    Column,
    better_by,
    column,
    gains,
    other_device_columns,
    other_run_columns,
    personal,
    prediction_rows,
    ratio_of,
    ratio_range,
    refused,
    trained,
    yardstick,
)
from fleetune.coordinator.metrics.registry import (
    AFTER,
    AFTER_MEAN,
    BEFORE,
    BEFORE_MEAN,
    BYTES_DOWN,
    BYTES_UP,
    DURATION,
    ENERGY,
    EXPECTED,
    PERSONAL,
    PERSONAL_MEAN,
    PERSONAL_WEIGHTED,
    PERSONAL_WORST,
    SAMPLES,
    SERVED,
    SHARE_DOWN,
    SHARE_UP,
    UPDATES,
)
from fleetune.coordinator.metrics.summary import Summary
from fleetune.coordinator.reports.diagnostics.section import device_columns, section
from fleetune.coordinator.reports.markup import Plot, card, document, element, figure, row, table
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.tasks import score_named
from fleetune.protocols.tasks.scores import ACCURACY, Score

_CARDS: Place = "page cards"
_METHODS: Place = "page methods"
_DEVICES: Place = "page devices"
_ONE_MORE = Column("one more round, before → after", (BEFORE_MEAN, AFTER_MEAN), readable.change)
_IN_CARDS = (
    *(column(one, _CARDS) for one in (PERSONAL_MEAN, PERSONAL_WEIGHTED, SERVED, BYTES_UP, SHARE_UP)),
    *(column(one, _CARDS) for one in (BYTES_DOWN, SHARE_DOWN, DURATION, ENERGY)),
    _ONE_MORE,
)
_IN_METHODS = (
    *(column(one, _METHODS) for one in (PERSONAL_MEAN, PERSONAL_WEIGHTED, PERSONAL_WORST)),
    _ONE_MORE,
    *(column(one, _METHODS) for one in (BYTES_UP, SHARE_UP, BYTES_DOWN, SHARE_DOWN, DURATION)),
)
_SAMPLES, _PERSONAL = column(SAMPLES, _DEVICES), column(PERSONAL, _DEVICES)
_BEHIND = (
    Column(_ONE_MORE.head, (BEFORE, AFTER), readable.change),
    *(column(one, _DEVICES) for one in (SERVED, BYTES_UP, BYTES_DOWN, UPDATES)),
    Column("a round took / expected", (DURATION, EXPECTED), readable.against),
)
_ABOUT_ACCURACY = (
    "Personal accuracy: each device's own model on its own test samples after the last round it took part "
    "in, mean over the devices that took part. One more round: the final evaluation, before and after local "
    "training."
)
_CAPTIONS = {
    "accuracy-by-round": "Mean over each round's participants: the model local training starts from "
    "(before), and the personal model it leads to (after). Dashed: where other methods ended.",
    "accuracy-by-uplink": "The same accuracy (after) against all that devices had sent by then. "
    "Dots: whole runs, all devices.",
    "bytes-by-round": "Payload that crossed the wire in each round. Dashed: as many whole models in float32; "
    "percentages: share of it over the whole run.",
    "accuracy-by-device": "Each device's personal model on its own test samples.",
    "over-alone": "What each device serves against the model that it trained alone, on the same test "
    "samples, in percentage points; bars, and the band around the mean: 95 % each way. Grey: it serves that "
    "model itself.",
    "gain-by-device": "What each device's personal model does better, in percentage points.",
    "predicted-by-actual": "Seconds of each reply's round, download, training and upload together: what the "
    "device expected when it chose its ratio, and what it took. In the band it was within a quarter. "
    "The title is about the later rounds, once there are any.",
}
_PREDICTED = "predicted-by-actual"
_ABOUT_PREDICTIONS = (
    "Before each round a device predicts what it will take of it, and takes the largest ratio that fits. "
    "Errors are relative to what it really took; a tenth of the replies reaches or exceeds the worst decile."
)


@dataclass(frozen=True)
class Page:
    """What the page tells.

    Attributes:
        title: the run's name.
        summary: of the run, personal accuracies filled in (`outcome.with_personal`).
        rivals: other methods' summaries by name.
        boards: of the devices.
        plots: in their order.
        run_file: run.toml as it is.
        remark: one line instead of plots, "" for none.
    """

    title: str
    summary: Summary
    rivals: Mapping[str, Summary] = field(default_factory=dict)
    boards: Mapping[DeviceId, str] = field(default_factory=dict)
    plots: Sequence[Plot] = ()
    run_file: str = ""
    remark: str = ""


def write_page(page: Page) -> bytes:
    """The page as UTF-8; whatever names and reasons hold, it stays text."""
    sections = [
        element("h1", page.title),
        element("p", _what_ran(page.summary), class_="faint"),
        _headline(page),
        element("p", in_words_of(page.summary.judged_by, _ABOUT_ACCURACY), class_="faint"),
        *_scores(page.summary),
        *([element("h2", "Methods"), _methods(page)] if page.rivals else []),
        element("h2", "Plots"),
        element("p", page.remark) if page.remark else _plots(page),
        *section(page.summary, page.plots),
        *([element("h2", "Predictions"), *_predictions(page)] if page.summary.predicted_vs_actual else []),
        element("h2", "Devices"),
        _devices(page),
        element("h2", "Refused"),
        _refusals(page),
        element("h2", "Settings"),
        element("pre", page.run_file),
    ]
    return document(page.title, sections)


def _what_ran(summary: Summary) -> str:
    return (
        f"{summary.method} on {summary.model} ({summary.parameters:,} parameters) · "
        f"{summary.devices} devices · {summary.rounds} rounds · seed {summary.seed} · "
        + (
            "simulated: real training and real bytes on a virtual clock"
            if summary.simulated
            else "real fleet"
        )
        + ("" if summary.agents is UNSET else f" · agents: {_counted(summary.agents)}")
    )


def _counted(versions: Mapping[str, int]) -> str:
    return ", ".join(f"{version} ({num_devices})" for version, num_devices in versions.items())


def _headline(page: Page) -> Element:
    summary = page.summary
    own, score = trained(summary), summary.judged_by
    sign = better_by(score)
    worst = min(own, key=lambda device: sign * own[device], default=None)
    weighted = f"mean; by samples {_run_text(PERSONAL_WEIGHTED, summary)}"
    cards = [
        _card(PERSONAL_MEAN, summary, weighted, *filter(None, [summary.who_took_part]), *_over_rivals(page)),
        card("Worst device", unit_of(score).text(own[worst]), worst) if worst else None,
        card("One more round", _ONE_MORE.seen_as(score).of_run(summary), "before → after")
        if AFTER_MEAN.of_run(summary) is not None
        else None,
        _card(SERVED, summary, "the best or newest of the run, as devices keep it")
        if SERVED.of_run(summary) is not None
        else None,
        _adoption(summary),
        _rollout(summary),
        _card(BYTES_UP, summary, f"{_run_text(SHARE_UP, summary)} of whole models"),
        _card(BYTES_DOWN, summary, f"{_run_text(SHARE_DOWN, summary)} of whole models"),
        card(
            DURATION.head(_CARDS) + (", simulated" if summary.simulated else ""),
            _run_text(DURATION, summary),
            "until the last round closed",
        ),
        _energy(summary),
        *(card(one.head, one.of_run(summary)) for one in other_run_columns(_CARDS, _IN_CARDS, [summary])),
    ]
    return element("dl", *cards, class_="cards")


def _card(metric: Metric, summary: Summary, *notes: str) -> Element:
    seen = metric.seen_as(summary.judged_by)
    return card(seen.head(_CARDS), _run_text(seen, summary), *notes)


def _run_text(metric: Metric, summary: Summary) -> str:
    return metric.seen_as(summary.judged_by).unit.text(metric.of_run(summary))


def in_words_of(score: Score, text: str) -> str:
    """A text on accuracy, of another score."""
    if score == ACCURACY:
        return text
    said = text.replace("accuracy", score.title).replace("in percentage points", f"in its {score.title}")
    return f"{said} {score.about} {'More' if score.better == 'higher' else 'Less'} is better."


def _scores(summary: Summary) -> list[Element]:
    """All scores of the run's task, of the personal models; nothing where there is no [task]."""
    if not isinstance(summary.scores, dict):
        return []
    told = ((score_named(name), value) for name, value in summary.scores.items())
    rows = [
        row([score.title, unit_of(score).text(value), element("td", score.about, class_="prose")])
        for score, value in told
        if score is not None
    ]
    return [table(["score", "personal models, mean over devices", "what it is"], rows, left=["what it is"])]


def _over_rivals(page: Page) -> list[str]:
    ours, score = page.summary.judged.personal_mean, page.summary.judged_by
    theirs = {name: rival.judged.personal_mean for name, rival in page.rivals.items()}
    gain, sign = unit_of(score).gain, better_by(score)
    return [
        f"{gain(sign * (ours - value))} over {name}"
        for name, value in theirs.items()
        if ours is not None and value is not None
    ]


def _energy(summary: Summary) -> Element | None:
    if ENERGY.of_run(summary) is None:
        return None
    rows = summary.by_device.values()
    told = sum(ENERGY.of_device(row) is not None for row in rows)
    return _card(ENERGY, summary, f"measured by {told} of {len(rows)} devices")


def _adoption(summary: Summary) -> Element | None:
    """How many devices use what the fleet led them to, and what that is worth to them."""
    found = summary.adoption
    if found is UNSET:
        return None
    served, *gain = adoption_words(found, summary.judged_by)
    return card("Adopted", served, *gain, f"{found.below} below alone by more than the noise of their tests")


def _rollout(summary: Summary) -> Element | None:
    """The versions of the shared model, where they go to canaries first."""
    found = summary.rollout
    if found is UNSET:
        return None
    trial = f"{found.trial} on trial with {found.canaries} canaries, {found.told} tell" if found.trial else ""
    counts = f"{found.went_out} went out to all, {found.stopped} stopped"
    out = f"{found.approved} is out" if found.approved else "none is out"
    return card("Version", out, *filter(None, [trial, counts]), *found.why[-1:])


def _methods(page: Page) -> Element:
    runs = [*page.rivals.items(), (page.summary.method, page.summary)]
    others = other_run_columns(_METHODS, _IN_METHODS, [summary for _, summary in runs])
    columns = [one.seen_as(page.summary.judged_by) for one in (*_IN_METHODS, *others)]
    rows = [
        row([name, *(one.of_run(summary) for one in columns)], "ours" if summary is page.summary else "")
        for name, summary in runs
    ]
    return table(["method", *(one.head for one in columns)], rows)


def _plots(page: Page) -> Element:
    shown = (
        figure(plot, in_words_of(page.summary.judged_by, _CAPTIONS[plot.name]))
        for plot in page.plots
        if plot.name in _CAPTIONS and plot.name != _PREDICTED
    )
    return element("div", *shown, class_="plots")


def _predictions(page: Page) -> list[Element]:
    """How far off the devices were, in numbers and as a picture."""
    rows = [row(cells) for cells in prediction_rows(page.summary)]
    columns = ["", "replies", "median error", "worst decile", "median after 5 rounds", "worst decile"]
    plots = [figure(plot, _CAPTIONS[plot.name]) for plot in page.plots if plot.name == _PREDICTED]
    return [
        element("p", _ABOUT_PREDICTIONS, class_="faint"),
        element("div", table(columns, rows), *plots, class_="plots"),
    ]


def _devices(page: Page) -> Element:
    rival = yardstick(page.rivals)
    theirs = personal(page.rivals[rival]) if rival else {}
    gained = gains(page.summary, page.rivals[rival]) if rival else {}
    by_hand, score = [_SAMPLES, _PERSONAL, *_BEHIND], page.summary.judged_by
    others = other_device_columns(_DEVICES, by_hand, page.summary.by_device.values())
    behind = [one.seen_as(score) for one in (*_BEHIND, *others, *device_columns(page.summary))]
    own, unit = _PERSONAL.seen_as(score), unit_of(score)
    grouped = any(row.group is not UNSET for row in page.summary.by_device.values())
    heads = [
        "device",
        *["group"] * grouped,
        "board",
        "p",
        _SAMPLES.head,
        *([rival] if rival else []),
        own.head,
    ]
    heads += [
        *(["gain, points" if score.share else "gain"] if rival else []),
        *(one.head for one in behind),
        "why this p",
    ]
    rows = []
    for device, told in page.summary.by_device.items():
        gain = gained.get(device)
        cells: list[str | Element] = [
            device,
            *[element("td", told.group or readable.UNKNOWN, class_="text")] * grouped,
            element("td", page.boards.get(device, readable.UNKNOWN), class_="text"),
            _ratio(page.summary, device),
            _SAMPLES.of_device(told),
            *([unit.text(theirs.get(device))] if rival else []),
            own.of_device(told),
            *([element("td", unit.gain(gain), class_=_verdict(gain))] if rival else []),
            *(one.of_device(told) for one in behind),
            element("td", told.reason or readable.UNKNOWN, class_="text"),
        ]
        rows.append(row(cells))
    return table(heads, rows, left=["group", "board", "why this p"])


def _ratio(summary: Summary, device: DeviceId) -> str:
    """The latest ratio of a device, and between which it went."""
    latest, between = readable.ratio(ratio_of(summary, device)), ratio_range(summary, device)
    return latest if between is None else f"{latest} ({'–'.join(map(readable.ratio, between))})"  # noqa: RUF001


def _verdict(gain: float | None) -> str:
    return "" if not gain else "good" if gain > 0 else "bad"


def _refusals(page: Page) -> Element:
    found = refused(page.summary)
    if not found:
        return element("p", "Nothing was refused, and no attempt at a round was given up.")
    rows = [
        row([kind, f"{count:,}", element("td", meaning, class_="prose")]) for kind, count, meaning in found
    ]
    return table(["what", "times", "meaning"], rows, left=["meaning"])
