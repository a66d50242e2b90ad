"""`edge-coordinator explain`: the ratios of a run's devices, with cost, results and reasons."""

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
from fleetune.coordinator.rounds.proposals.candidate_plans import Plans
from fleetune.coordinator.rounds.proposals.idle_energy import idle_cost
from fleetune.coordinator.rounds.proposals.planner import Planner, reporting
from fleetune.coordinator.rounds.records import DeviceRound, RoundRecord
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.methods import utility_of
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.update.encodings import chosen, in_words

LATEST = 8  # number of latest rounds that the text covers
_WHY = {
    "time": "time: most utility a second; each device does what fits the target round duration",
    "bytes": "bytes: each device does no more than its option of most utility a byte",
    "energy": "energy: each device does no more than its option of most utility a joule, idling included",
}
_NONE = "no [objective]: each device takes the largest ratio that fits its limits"
_ASSIGNED = "fleet.ratios assigns each device its ratio"


def by_ratio(records: Sequence[RoundRecord]) -> list[RatioSummary]:
    """Return cost and results of every ratio that a reply used, ascending."""
    replies: dict[float, list[DeviceRound]] = {}
    for record in records:
        for reply in () if record.final_evaluation else record.devices.values():
            replies.setdefault(reply.ratio, []).append(reply)
    return [_of_ratio(ratio, replies[ratio]) for ratio in sorted(replies)]


def by_encoding(records: Sequence[RoundRecord]) -> list[EncodingSummary]:
    """Return replies and bytes of every encoding that was requested for an update, largest payload first."""
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
    """Return a table of all ratios and the reasons for them, for a terminal."""
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
        yield _ASSIGNED if settings.fleet.ratios else _NONE
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
            done = " to ".join(dict.fromkeys(map(readable.share, (min(parts), max(parts)))))
            yield f"{len(parts)} of {len(latest[-1].devices)} did {done} of the local training in the latest"
    if len(settings.uplinks) > 1:
        yield from _of_encodings(settings, state, records)
    yield from _of_devices(settings, state)


def _of_encodings(settings: RunSettings, state: EngineState, records: Sequence[RoundRecord]) -> Iterator[str]:
    """Yield lines on the encodings of past and next updates, and their compression errors."""
    rows = by_encoding(records)
    if rows:
        used = ", ".join(f"{row.replies} by {row.encoding} ({readable.size(row.up)})" for row in rows)
        yield f"updates of all rounds, with their median size: {used}"
    names = [in_words(one) for one in settings.uplinks]
    assigned = Counter(member.assigned.uplink for member in state.members.values() if member.assigned)
    asked = ", ".join(f"{assigned[number]} by {names[number]}" for number in sorted(assigned))
    yield f"updates in the latest plan: {asked}"
    shares = zip(names, state.compression_errors.shares, strict=False)
    errors = ", ".join(f"{readable.share(share)} by {name}" for name, share in shares if share)
    if errors:
        yield f"compression error: {errors}"


def _of_devices(settings: RunSettings, state: EngineState) -> Iterator[str]:
    """Yield lines on the straggler that sets the target round duration, and on what limits other devices."""
    objective, ready = settings.objective, [name for name, member in state.members.items() if member.ready]
    costs = tuple(chosen(one).cost for one in settings.uplinks)
    planner = Planner(objective, costs, utility_of(settings.method))
    candidates = planner.candidates(state, ready)
    plans = reporting(candidates)
    allowed = planner.worthwhile(state, plans)
    longest_s = {name: max(one.seconds for one in some) for name, some in allowed.items()}
    waits = objective.minimise == "time" or idle_cost(state, plans, objective) is not None
    if waits and any(longest_s.values()):
        slowest = max(longest_s, key=lambda name: longest_s[name])
        yield f"the target round duration is {readable.duration(longest_s[slowest])}, set by {slowest}"
    if objective.minimise == "energy":
        unknown = sum(any(one.joules is None for one in some) for some in plans.values())
        if unknown:
            yield f"{unknown} of {len(plans)} devices do not report their energy: all their options stay"
        silent = sum(not _reports_idle_w(state.members[name].report) for name in plans)
        if silent:
            yield f"{silent} of {len(plans)} devices do not report their idle power: it counts as 0"
    limited = sum(_most_utility(allowed[name]) < _most_utility(some) for name, some in plans.items())
    if plans:
        yield f"{limited} of {len(plans)} devices could do more than the plan asks for"
    if len(plans) < len(candidates):
        names = ", ".join(sorted(candidates.keys() - plans.keys()))
        yield f"these report no options and choose their ratio themselves: {names}"


def _reports_idle_w(report: DeviceReport | None) -> bool:
    return report is not None and report.idle_w is not UNSET


def _most_utility(plans: Plans) -> float:
    return max(one.utility for one in plans)


def _median(figures: Sequence[float | None]) -> float | None:
    known = [one for one in figures if one is not None]
    return median(known) if known else None
