"""Writes report.html: one offline file with all results of a run, for all screen sizes and colour schemes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import UNSET

from fleetune.coordinator.metrics import readable
from fleetune.coordinator.metrics.adoption import adoption_texts
from fleetune.coordinator.metrics.diagnostics import PREFIX, as_sentence, metrics_in
from fleetune.coordinator.metrics.metric import Metric, capital, unit_of
from fleetune.coordinator.metrics.personal_scores import baseline, better_by, gains, personal, trained
from fleetune.coordinator.metrics.privacy import few_samples_line
from fleetune.coordinator.metrics.registry import (
    ADOPTED,
    AFTER,
    AFTER_MEAN,
    BEFORE,
    BEFORE_MEAN,
    BELOW_LOCAL_ONLY,
    BYTES_DOWN,
    BYTES_UP,
    DEPLOYED,
    DURATION,
    ENERGY,
    EPSILON,
    GAIN_OVER_LOCAL_ONLY,
    LOCAL_ONLY,
    PERSONAL,
    PERSONAL_MEAN,
    PERSONAL_WEIGHTED,
    PERSONAL_WORST,
    PREDICTED,
    SAMPLES,
    SHARE_DOWN,
    SHARE_UP,
    UPDATES,
)
from fleetune.coordinator.metrics.summary import Summary
from fleetune.coordinator.reports.columns import Column, other_metrics, wide
from fleetune.coordinator.reports.html import (
    Html,
    card,
    cards,
    cell,
    document,
    element,
    figure,
    figures,
    note,
    row,
    table,
)
from fleetune.coordinator.reports.tables import diagnostic_cells, prediction_rows, ratio_of, refused
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.tasks import score_named
from fleetune.protocols.tasks.scores import ACCURACY, Score

_ONE_MORE = Column("one more round, before → after", (BEFORE_MEAN, AFTER_MEAN), readable.change)
_SENT = (BYTES_UP, SHARE_UP, BYTES_DOWN, SHARE_DOWN, DURATION)
_IN_CARDS = (
    _ONE_MORE,
    *map(wide, (PERSONAL_MEAN, PERSONAL_WEIGHTED, PERSONAL_WORST, DEPLOYED, ENERGY, *_SENT)),
    wide(EPSILON),  # shown in a card of its own
    # shown in the adoption card
    *map(wide, (LOCAL_ONLY, GAIN_OVER_LOCAL_ONLY, ADOPTED, BELOW_LOCAL_ONLY)),
)
_IN_METHODS = (
    *map(wide, (PERSONAL_MEAN, PERSONAL_WEIGHTED, PERSONAL_WORST)),
    _ONE_MORE,
    *map(wide, _SENT),
)
_SAMPLES, _PERSONAL = wide(SAMPLES), wide(PERSONAL)
_LAST = (
    Column(_ONE_MORE.head, (BEFORE, AFTER), readable.change),
    *map(wide, (DEPLOYED, BYTES_UP, BYTES_DOWN, UPDATES)),
    Column("a round took / predicted", (DURATION, PREDICTED), readable.against),
)
_IN_DEVICES = (_SAMPLES, _PERSONAL, *_LAST)
_ABOUT_ACCURACY = (
    "Personal accuracy: each device's own model on its own test samples after the last round it took part "
    "in, mean over the devices that took part. One more round: the final evaluation, before and after local "
    "training."
)
_CAPTIONS = {
    "accuracy-by-round": "Mean over each round's participants: the model that local training starts from "
    "(before), and the personal model that it leads to (after). Dotted: the final score of other methods.",
    "accuracy-by-uplink": "The same accuracy (after) against all bytes that devices had sent by then. "
    "Dots: the end of each run, all devices.",
    "accuracy-by-device": "Each device's personal model on its own test samples, the worst device first. "
    "At the right: the median over devices.",
    "bytes-by-round": "Payload of each round. Dashed: as many whole models in float32; percentages: share of "
    "it over the whole run.",
}
_ABOUT_PREDICTIONS = (
    "Before each round a device predicts its cost, and takes the largest ratio that fits. Errors are "
    "relative to the actual cost; a tenth of the replies reaches or exceeds the worst decile."
)
_ABOUT_DIAGNOSTICS = (
    "Figures that the method reports about its own mechanisms. A figure of updates is the mean of a round; "
    "a figure of the coordinator is its state after the round. A figure with parts, such as layers, is shown "
    "as the range over the parts."
)
_DIAGNOSTIC_HEADS = ["figure", "at first", "last", "over the run", "what it is"]


@dataclass(frozen=True)
class Page:
    """The content of report.html.

    Attributes:
        title: the run's name.
        summary: summary of the run, with personal scores (`personal_scores.with_personal`).
        rivals: summaries of other methods, by name.
        boards: boards of the devices.
        pictures: plots as PNG files, by name.
        run_file: unchanged text of run.toml.
        remark: one line to show instead of plots; "" for none.
    """

    title: str
    summary: Summary
    rivals: Mapping[str, Summary] = field(default_factory=dict)
    boards: Mapping[DeviceId, str] = field(default_factory=dict)
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    run_file: str = ""
    remark: str = ""


def write_page(page: Page) -> bytes:
    """Return the page as UTF-8. All names and reasons are escaped."""
    summary = page.summary
    sections = [
        element("h1", page.title),
        note(_what_ran(summary)),
        _headline(page),
        note(in_words_of(summary.judged_by, _ABOUT_ACCURACY)),
        *_scores(summary),
        *([element("h2", "Methods"), _methods(page)] if page.rivals else []),
        element("h2", "Plots"),
        element("p", page.remark) if page.remark else _plots(page),
        *_diagnostics(summary),
        *_predictions(summary),
        element("h2", "Devices"),
        _devices(page),
        *_few_samples(summary),
        element("h2", "Refused"),
        _refusals(summary),
        element("h2", "Settings"),
        element("pre", page.run_file),
    ]
    return document(page.title, sections)


def _what_ran(summary: Summary) -> str:
    where = (
        "simulated: real training and real bytes on a virtual clock" if summary.simulated else "real fleet"
    )
    parts = [
        f"{summary.method} on {summary.model} ({summary.parameters:,} parameters)",
        f"{summary.devices} devices",
        f"{summary.rounds} rounds",
        f"seed {summary.seed}",
        where,
    ]
    if summary.agents is not UNSET:
        parts.append("agents: " + ", ".join(f"{name} ({count})" for name, count in summary.agents.items()))
    return " · ".join(parts)


def _headline(page: Page) -> Html:
    summary = page.summary
    own, score = trained(summary), summary.judged_by
    worst = min(own, key=lambda device: better_by(score) * own[device], default=None)
    part = [summary.who_took_part] if summary.who_took_part else []
    weighted = f"mean; by samples {_text(PERSONAL_WEIGHTED, summary)}"
    shown = [
        card(
            capital(PERSONAL_MEAN.for_score(score).title),
            _text(PERSONAL_MEAN, summary),
            weighted,
            *part,
            *_over_rivals(page),
        ),
        card("Worst device", unit_of(score).text(own[worst]), worst) if worst else None,
        card("One more round", _ONE_MORE.for_score(score).of(summary), "before → after")
        if AFTER_MEAN.of_run(summary) is not None
        else None,
        card("Deployed", _text(DEPLOYED, summary), "the best or newest of the run, as devices choose")
        if DEPLOYED.of_run(summary) is not None
        else None,
        _adoption(summary),
        _rollout(summary),
        _privacy(summary),
        card("Sent up", _text(BYTES_UP, summary), f"{_text(SHARE_UP, summary)} of whole models"),
        card("Sent down", _text(BYTES_DOWN, summary), f"{_text(SHARE_DOWN, summary)} of whole models"),
        card(
            "Time, simulated" if summary.simulated else "Time",
            _text(DURATION, summary),
            "until the last round closed",
        ),
        _energy(summary),
        *(
            card(capital(one.for_score(score).title), _text(one, summary))
            for one in other_metrics("run page", _IN_CARDS, [summary])
        ),
    ]
    return cards(one for one in shown if one is not None)


def _text(metric: Metric, summary: Summary) -> str:
    """Return a metric of the run, formatted by its unit."""
    return metric.for_score(summary.judged_by).unit.text(metric.of_run(summary))


def in_words_of(score: Score, text: str) -> str:
    """Return a text about accuracy, reworded for another score."""
    if score == ACCURACY:
        return text
    changed = text.replace("accuracy", score.title).replace("in percentage points", f"in its {score.title}")
    return f"{changed} {score.about} {'More' if score.better == 'higher' else 'Less'} is better."


def _scores(summary: Summary) -> list[Html]:
    """Return all scores of the run's task for the personal models; empty without a [task]."""
    if not isinstance(summary.scores, dict):
        return []
    known = ((score_named(name), value) for name, value in summary.scores.items())
    rows = [
        row([score.title, unit_of(score).text(value), cell(score.about, "text")])
        for score, value in known
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


def _energy(summary: Summary) -> Html | None:
    if ENERGY.of_run(summary) is None:
        return None
    rows = summary.by_device.values()
    measured = sum(ENERGY.of_device(one) is not None for one in rows)
    return card("Energy", _text(ENERGY, summary), f"measured by {measured} of {len(rows)} devices")


def _adoption(summary: Summary) -> Html | None:
    """Return the section on adoption: how many devices deploy a model of the fleet, and their gain."""
    found = summary.adoption
    if found is UNSET:
        return None
    adopted, *gain = adoption_texts(found, summary.judged_by)
    below = f"{found.below} below local-only by more than the noise of their tests"
    return card("Adopted", adopted, *gain, below)


def _rollout(summary: Summary) -> Html | None:
    """Return the section on the roll-out: versions that canaries tested, and the outcome; None without
    canaries.
    """
    found = summary.rollout
    if found is UNSET:
        return None
    trial = f"{found.trial} on trial with {found.canaries} canaries, {found.reporting} report"
    counts = f"{found.went_out} went out to all, {found.stopped} stopped"
    out = f"{found.approved} is out" if found.approved else "none is out"
    return card("Version", out, *[trial] * bool(found.trial), counts, *found.why[-1:])


def _privacy(summary: Summary) -> Html | None:
    """Return the section on [privacy]: what was spent, and of what; None without it."""
    found = summary.privacy
    if found is UNSET:
        return None
    limit = "no limit" if found.max_epsilon is None else f"limit {found.max_epsilon:g}"
    clipped = f"{found.noise} noise of {found.noise_multiplier:g} times the clip {found.clip:g}"
    scores = ["scores and losses were sent too; they are outside epsilon"] * found.scores
    return card("Epsilon", f"{found.epsilon:.3g}", f"delta {found.delta:g}, {limit}", clipped, *scores)


def _few_samples(summary: Summary) -> list[Html]:
    line = few_samples_line(summary.by_device, summary.privacy)
    return [element("p", line, class_="bad")] if line else []


def _methods(page: Page) -> Html:
    runs = [*page.rivals.items(), (page.summary.method, page.summary)]
    others = map(wide, other_metrics("run page", _IN_METHODS, [summary for _, summary in runs]))
    columns = [one.for_score(page.summary.judged_by) for one in (*_IN_METHODS, *others)]
    rows = [
        row([name, *(one.of(summary) for one in columns)], "ours" if summary is page.summary else "")
        for name, summary in runs
    ]
    return table(["method", *(one.head for one in columns)], rows)


def _plots(page: Page) -> Html:
    return figures(
        figure(png, in_words_of(page.summary.judged_by, _CAPTIONS[name]))
        for name, png in page.pictures.items()
    )


def _diagnostics(summary: Summary) -> list[Html]:
    """Return each diagnostic's description, first and last value; empty if there are none."""
    found = summary.diagnostics_by_name.values()
    rows = [row([*diagnostic_cells(one), cell(as_sentence(one.about), "text")]) for one in found]
    shown = table(_DIAGNOSTIC_HEADS, rows, left=_DIAGNOSTIC_HEADS[-1:])
    return [element("h2", "Diagnostics of the method"), note(_ABOUT_DIAGNOSTICS), shown] if rows else []


def _predictions(summary: Summary) -> list[Html]:
    """Return the errors of the devices' predictions; empty if no device predicted anything."""
    columns = ["", "replies", "median error", "worst decile", "median after 5 rounds", "worst decile"]
    rows = list(map(row, prediction_rows(summary)))
    return [element("h2", "Predictions"), note(_ABOUT_PREDICTIONS), table(columns, rows)] if rows else []


def _devices(page: Page) -> Html:
    summary, rival = page.summary, baseline(page.rivals)
    theirs = personal(page.rivals[rival]) if rival else {}
    gained = gains(summary, page.rivals[rival]) if rival else {}
    score, unit = summary.judged_by, unit_of(summary.judged_by)
    others = map(wide, other_metrics("device page", _IN_DEVICES, summary.by_device.values()))
    last = [one.for_score(score) for one in (*_LAST, *others, *_diagnostic_columns(summary))]
    own = _PERSONAL.for_score(score)
    grouped = any(one.group is not UNSET for one in summary.by_device.values())
    heads = [
        "device",
        *["group"] * grouped,
        "board",
        "p",
        _SAMPLES.head,
        *([rival] if rival else []),
        own.head,
        *(["gain, points" if score.share else "gain"] if rival else []),
        *(one.head for one in last),
        "why this p",
    ]
    rows = []
    for device, one in summary.by_device.items():
        gain = gained.get(device)
        cells = [
            device,
            *[cell(one.group or readable.UNKNOWN, "text")] * grouped,
            cell(page.boards.get(device, readable.UNKNOWN), "text"),
            _ratios(summary, device),
            _SAMPLES.of(one),
            *([unit.text(theirs.get(device))] if rival else []),
            own.of(one),
            *([cell(unit.gain(gain), "" if not gain else "good" if gain > 0 else "bad")] if rival else []),
            *(column.of(one) for column in last),
            cell(one.reason or readable.UNKNOWN, "text"),
        ]
        rows.append(row(cells))
    return table(heads, rows, left=["group", "board", "why this p"])


def _diagnostic_columns(summary: Summary) -> list[Column]:
    """Return a column for each scalar diagnostic that the method reports with an update, averaged over
    rounds.
    """
    found = summary.diagnostics_by_name.items()
    plain = {f"{PREFIX}{name}" for name, one in found if one.of == "update" and not one.by}
    return [wide(one) for one in metrics_in([summary]) if one.name in plain]


def _ratios(summary: Summary, device: DeviceId) -> str:
    """Return the latest ratio of a device, and its range if the device used several."""
    latest, used = readable.ratio(ratio_of(summary, device)), summary.ratios.get(device, [])
    if len(set(used)) < 2:
        return latest
    return f"{latest} ({readable.ratio(min(used))}–{readable.ratio(max(used))})"  # noqa: RUF001 - an en dash


def _refusals(summary: Summary) -> Html:
    found = refused(summary)
    if not found:
        return element("p", "Nothing was refused, and no attempt at a round was given up.")
    rows = [row([kind, f"{count:,}", cell(meaning, "text")]) for kind, count, meaning in found]
    return table(["what", "times", "meaning"], rows, left=["meaning"])
