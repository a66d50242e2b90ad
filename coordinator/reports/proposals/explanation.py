"""`edge-coordinator explain`: at which ratios a run's devices work, what each takes and brings, and why."""

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import mean, median

from msgspec import UNSET
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from fleetune.coordinator.metrics import readable
from fleetune.coordinator.metrics.summary import EncodingSummary, RatioSummary
from fleetune.coordinator.rounds.engine_state import EngineState
from fleetune.coordinator.rounds.proposals.idling import idling_of
from fleetune.coordinator.rounds.proposals.offers import Choices, Ways, choices_of
from fleetune.coordinator.rounds.proposals.pace import what_pays
from fleetune.coordinator.rounds.records import DeviceRound, RoundRecord
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.methods import worth_of
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.update.encodings import chosen, in_words

LATEST = 8  # rounds that the words are about
_WHY = {
    "time": "time: rounds as short as it pays; each device does the most work within that",
    "bytes": "bytes: each device does no more than brings most a byte sent",
    "energy": "energy: each device does no more than brings most a joule, idling counted",
    "money": "money: each device does no more than brings most for its price",
}
_NONE = "no [objective]: each device takes the largest ratio that fits its limits"
_DEALT = "fleet.ratios deals each device its ratio"


def by_ratio(records: Sequence[RoundRecord]) -> list[RatioSummary]:
    """Every ratio that a reply was made at, ascending."""
    replies: dict[float, list[DeviceRound]] = {}
    for record in records:
        for reply in () if record.final_evaluation else record.devices.values():
            replies.setdefault(reply.ratio, []).append(reply)
    return [_of_ratio(ratio, replies[ratio]) for ratio in sorted(replies)]


def by_encoding(records: Sequence[RoundRecord]) -> list[EncodingSummary]:
    """Every encoding that an update was asked for by, those of most bytes first."""
    sizes: dict[str, list[int]] = {}
    for record in records:
        for reply in () if record.final_evaluation else record.devices.values():
            if reply.encoding:
                sizes.setdefault(reply.encoding, []).append(reply.bytes_up)
    rows = [EncodingSummary(name, len(some), median(some)) for name, some in sizes.items()]
    return sorted(rows, key=lambda row: row.up, reverse=True)


def _of_ratio(ratio: float, replies: Sequence[DeviceRound]) -> RatioSummary:
    return RatioSummary(
        ratio=ratio,
        replies=len(replies),
        seconds=_median([reply.actual.round_s for reply in replies]),
        up=_median([reply.bytes_up for reply in replies]),
        joules=_median([reply.actual.joules for reply in replies]),
        local_work=mean(reply.local_work for reply in replies),
    )


def explanation(settings: RunSettings, state: EngineState, records: Sequence[RoundRecord]) -> Group:
    """A table of all ratios, and words on the pace, for a terminal."""
    rows = by_ratio(records)
    table = Table(title=f"ratios of {settings.run.name}", box=SIMPLE_HEAD, show_edge=False)
    for head in ("p", "replies", "local\ntraining", "a round\ntakes", "up", "energy"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            readable.ratio(row.ratio),
            str(row.replies),
            readable.share(row.local_work),
            readable.duration(row.seconds),
            readable.size(row.up),
            readable.energy(row.joules),
        )
    lines = map(Text, _lines(settings, state, records))
    return Group(table if rows else Text("no reply yet"), *lines)


def _lines(settings: RunSettings, state: EngineState, records: Sequence[RoundRecord]) -> Iterator[str]:
    if not settings.proposes_ratios:
        yield _DEALT if settings.fleet.ratios else _NONE
        return
    yield f"minimise {_WHY[settings.objective.minimise]}"
    latest = [record for record in records if not record.final_evaluation][-LATEST:]
    if latest:
        took_s = median(record.closed_s - record.opened_s for record in latest)
        yield f"the latest {len(latest)} rounds took {readable.duration(took_s)} in the median"
        counted = Counter(reply.ratio for record in latest for reply in record.devices.values())
        most = ", ".join(f"{count} at p = {ratio:g}" for ratio, count in sorted(counted.items()))
        yield f"replies in them: {most}"
        parts = [reply.local_work for reply in latest[-1].devices.values() if reply.local_work != 1]
        if parts:
            told = " to ".join(dict.fromkeys(map(readable.share, (min(parts), max(parts)))))
            yield f"{len(parts)} of {len(latest[-1].devices)} did {told} of the local training in the latest"
    if len(settings.uplinks) > 1:
        yield from _of_encodings(settings, state, records)
    yield from _of_devices(settings, state)


def _of_encodings(settings: RunSettings, state: EngineState, records: Sequence[RoundRecord]) -> Iterator[str]:
    """How updates were written, and how the next ones are to be."""
    rows = by_encoding(records)
    if rows:
        used = ", ".join(f"{row.replies} by {row.encoding} ({readable.size(row.up)})" for row in rows)
        yield f"updates of all rounds, and the median of their bytes: {used}"
    names = [in_words(one) for one in settings.uplinks]
    dealt = Counter(member.dealt.uplink for member in state.members.values() if member.dealt)
    asked = ", ".join(f"{dealt[number]} by {names[number]}" for number in sorted(dealt))
    yield f"updates they are asked for: {asked}"
    told = [(name, share) for name, share in zip(names, state.left_out.shares, strict=False) if share]
    if told:
        left = ", ".join(f"{readable.share(share)} by {name}" for name, share in told)
        yield f"of a change they leave for a later update: {left}"


def _of_devices(settings: RunSettings, state: EngineState) -> Iterator[str]:
    """Who sets the pace, and who could do more or less."""
    members = {name: member for name, member in state.members.items() if member.ready}
    costs = tuple(chosen(one).cost for one in settings.uplinks)
    known = Ways(costs, worth_of(settings.method)).known(state.left_out)
    choices = {name: choices_of(member, settings.objective, known) for name, member in members.items()}
    silent = sorted(name for name, some in choices.items() if not some)
    choices = {name: some for name, some in choices.items() if some}
    objective = settings.objective
    kept = what_pays(state, choices, objective)
    waits = objective.minimise == "time" or idling_of(state, choices, objective) is not None
    longest_s = {name: max(one.seconds for one in some) for name, some in kept.items()}
    if waits and any(longest_s.values()):
        slowest = max(longest_s, key=lambda name: longest_s[name])
        yield f"the pace is {readable.duration(longest_s[slowest])}, which {slowest} needs"
    if objective.minimise in ("energy", "money"):
        unknown = sum(any(one.joules is None for one in some) for some in choices.values())
        if unknown:
            yield f"{unknown} of {len(choices)} devices do not know what they draw: all that fits may pay"
        still = sum(not _says_idle_w(state.members[name].report) for name in choices)
        if still:
            yield f"{still} of {len(choices)} do not say what they draw doing nothing: that counts as none"
    limited = sum(_most_work(kept[name]) < _most_work(some) for name, some in choices.items())
    if choices:
        yield f"{limited} of {len(choices)} devices could do more than that allows"
    if silent:
        yield f"these do not say what they could do and choose themselves: {', '.join(silent)}"


def _says_idle_w(report: DeviceReport | None) -> bool:
    return report is not None and report.idle_w is not UNSET


def _most_work(choices: Choices) -> float:
    return max(one.work for one in choices)


def _median(figures: Sequence[float | None]) -> float | None:
    known = [one for one in figures if one is not None]
    return median(known) if known else None
