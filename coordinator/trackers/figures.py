"""What trackers are told of a run: plain numbers by name, in the groups below.

`score/`, `cost/`, `round/` and `summary/` are followed by the names that data frames and CSV files use.
`diagnostics/NAME` is a diagnostic of the method: its mean over a round's updates and over its parts.
`diagnostics/NAME/PART` is one of few parts.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import NODEFAULT, Struct
from msgspec.structs import fields

from fleetune.coordinator.metrics.averages import mean
from fleetune.coordinator.metrics.personal_scores import with_personal
from fleetune.coordinator.metrics.registry import AFTER, BEFORE, METRICS
from fleetune.coordinator.metrics.summary import Summary
from fleetune.coordinator.reports.columns import OF_ROUNDS, column_of
from fleetune.coordinator.reports.diagnostics.course import told_in
from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.coordinator.trackers.tracker import Parameter, RoundFigures
from fleetune.protocols.method.diagnostics import Diagnostic
from fleetune.protocols.methods import diagnostics_of
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.tasks import task_of

MOST_PARTS = 32  # of a figure that are told one by one
_ALWAYS = ("run.seed", "run.rounds")
_OF_OTHERS = ("compare", "paper")  # sections that no run heeds


class Course:
    """A run's rounds as they close: each one's figures, and how the fleet stands then.

    `..._of_fleet` counts every device that has taken part, with its latest reply; `devices_so_far` is how
    many these are.
    """

    def __init__(self, settings: RunSettings) -> None:
        self._score = task_of(settings.task).score
        self._diagnostics = tuple(diagnostics_of(settings.method))
        self._fleet = {metric.name: _Latest() for metric in (BEFORE, AFTER)}
        self._known: set[str] = set()

    def take(self, record: RoundRecord) -> RoundFigures:
        """The figures of a training round."""
        told: dict[str, float | None] = {
            "round/participants": len(record.participants),
            "round/replies": len(record.devices),
            "round/closed_s": record.closed_s,
        }
        for metric in OF_ROUNDS:
            group = "score" if metric.judges else "cost"
            told[f"{group}/{column_of(metric, self._score)}"] = metric.of_round(record)
        self._known |= record.devices.keys()
        told["round/devices_so_far"] = len(self._known)
        for metric in (BEFORE, AFTER):
            latest = self._fleet[metric.name]
            for device, reply in record.devices.items():
                latest.put(device, metric.of_reply(reply))
            told[f"score/{column_of(metric, self._score)}_of_fleet"] = latest.mean
        for diagnostic in self._diagnostics:
            told |= _inside(record, diagnostic)
        return RoundFigures(record.number, _known(told.items()))


class _Latest:
    """Each device's latest value, and their mean without going through all devices."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._total = 0.0

    def put(self, device: str, value: float | None) -> None:
        if value is not None:
            self._total += value - self._values.get(device, 0.0)
            self._values[device] = value

    @property
    def mean(self) -> float | None:
        return self._total / len(self._values) if self._values else None


def _inside(record: RoundRecord, diagnostic: Diagnostic) -> dict[str, float | None]:
    told = told_in(record, diagnostic)
    if not told:
        return {}
    name = f"diagnostics/{diagnostic.name}"
    found = {name: mean(value for parts in told for value in parts.values())}
    names = list(dict.fromkeys(part for parts in told for part in parts if part))
    if len(names) <= MOST_PARTS:
        found |= {f"{name}/{part}": mean(parts[part] for parts in told if part in parts) for part in names}
    return found


def figures_of_run(summary: Summary, records: Sequence[RoundRecord]) -> dict[str, float]:
    """Of the whole run, as summary.json and tables have them."""
    whole = with_personal(summary, records)
    return _known(
        (f"summary/{column_of(metric, whole.judged_by)}", metric.of_run(whole)) for metric in METRICS
    )


def parameters_of(settings: RunSettings) -> dict[str, Parameter]:
    """The settings that are not what they would be anyway, by `section.key`, and always the seed."""
    found: dict[str, Parameter] = {}
    for section in fields(settings):
        if section.name not in _OF_OTHERS:
            found |= _said(section.name, getattr(settings, section.name))
    return found


def _said(path: str, value: Any) -> Iterator[tuple[str, Parameter]]:
    """What differs from the defaults in a section, or in a table of one."""
    if isinstance(value, Struct):
        plain = {one.name: _plain(one) for one in fields(value)}
        for key in value.__struct_fields__:
            own = getattr(value, key)
            if own != plain[key] or f"{path}.{key}" in _ALWAYS:
                yield from _said(f"{path}.{key}", own)
    elif isinstance(value, Mapping):
        for key, own in value.items():
            yield from _said(f"{path}.{key}", own)
    elif isinstance(value, Parameter):
        yield path, value
    elif value is not None:
        yield path, msgspec.json.encode(value).decode()


def _plain(one: Any) -> Any:
    return one.default_factory() if one.default_factory is not NODEFAULT else one.default


def _known(told: Iterable[tuple[str, float | None]]) -> dict[str, float]:
    return {name: float(value) for name, value in told if value is not None}
