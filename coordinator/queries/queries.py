"""Queries about a run in a folder. They work while a coordinator serves the run and after the run.

Each function returns typed values and prints nothing. A command line, a page or an HTTP API can show the
values; `msgspec.json.encode` encodes each of them. Docs: docs/queries.md.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct

from fleetune.coordinator.extensions.releases import read_rollout
from fleetune.coordinator.extensions.rollout import Rollout
from fleetune.coordinator.metrics import registry
from fleetune.coordinator.metrics.personal_scores import with_personal
from fleetune.coordinator.metrics.summarise import summarise
from fleetune.coordinator.queries.run_status import LATEST_ROUNDS, DeviceStatus, RunStatus, StatusReader
from fleetune.coordinator.rounds.engine_state import EngineState
from fleetune.coordinator.rounds.records import Ledger, RoundRecord
from fleetune.coordinator.run.few_groups import few_groups_line
from fleetune.coordinator.run.stored_run import stored_run
from fleetune.coordinator.store.broker_outage import Outage, read_outage
from fleetune.coordinator.store.device_rows import read_engine, read_ledger
from fleetune.coordinator.store.folder_lock import is_claimed
from fleetune.coordinator.store.run_folder import SHARED
from fleetune.coordinator.store.troubles import read_troubles
from fleetune.protocols.methods import diagnostics_of
from fleetune.protocols.model.spec import ModelSpec
from fleetune.protocols.settings.run_settings import RunSettings

_STOPPED = "no coordinator is at it: it goes on when it is served again; what stands here is how it was left"


class MetricValue(Struct, frozen=True):
    """Current value of one metric of a whole run.

    Attributes:
        name: name in data frames of this run, e.g. `accuracy_personal_mean`.
        title, about: title and description for people.
        unit: seconds, bytes, joules, ratio, or "" for counts and numbers.
        better: "higher" or "lower"; None if neither is better.
        value: the value; None if unknown.
    """

    name: str
    title: str
    about: str
    unit: str
    better: str | None
    value: float | None


class ModelVersion(Struct, frozen=True):
    """A model that the coordinator holds.

    Attributes:
        kind: `shared` is the newest model. In runs with adoption.canary, `approved` is the version for all
            devices and `trial` the version for canaries only.
        model: name of the model.
        num_parameters: number of its parameters.
        round: training round that produced it; 0 for the initial model.
        file: safetensors file in the run's folder; None if not written.
    """

    kind: str
    model: str
    num_parameters: int
    round: int
    file: str | None = None


def status(folder: Path, now: float | None = None) -> RunStatus:
    """Return the status of a run.

    Args:
        folder: the run's folder.
        now: seconds since 1970; None for the present time.

    Raises:
        SettingError: the folder holds no started run.
        StoreError: the store is damaged.
        StoreVersion: another version of Fleetune wrote the store.
    """
    return _Stored.read(folder, recent=True).status(now)


def devices(folder: Path) -> tuple[DeviceStatus, ...]:
    """Return all devices that ever contacted the run, sorted by name. Raises the errors of `status`."""
    return _Stored.read(folder).devices()


def status_and_devices(folder: Path, now: float | None = None) -> tuple[RunStatus, tuple[DeviceStatus, ...]]:
    """Return the results of `status` and `devices`, read at the same moment."""
    stored = _Stored.read(folder)
    return stored.status(now), stored.devices()


def rounds(folder: Path, since: int = 0) -> tuple[RoundRecord, ...]:
    """Return closed rounds with numbers above `since`, ascending. Raises the errors of `status`.

    The final evaluation comes last. After a rollback, a new round replaces the old one with the same number.
    An open-ended run drops some of its old rounds.
    """
    return tuple(record for record in _Stored.read(folder).records if record.number > since)


def metrics(folder: Path) -> tuple[MetricValue, ...]:
    """Return the current values of all metrics of the run, in the registry's order. Raises the errors of
    `status`.
    """
    stored = _Stored.read(folder)
    found = summarise(
        stored.settings,
        stored.spec,
        stored.records,
        stored.ledger,
        stored.state.counters,
        simulated=False,  # no metric depends on it
        diagnostics=diagnostics_of(stored.settings.method),
        rollout=stored.rollout,
    )
    summary = with_personal(found, stored.records)
    score, without_key = summary.judged_by, registry.metrics_without_key()
    return tuple(
        MetricValue(one.column(score), one.title, one.about, one.unit.name, one.better, seen.of_run(summary))
        for seen in registry.METRICS
        if seen.run or seen in without_key
        for one in (seen.for_score(score),)
    )


def models(folder: Path) -> tuple[ModelVersion, ...]:
    """Return the models that the coordinator holds. Raises the errors of `status`."""
    stored = _Stored.read(folder)
    name, size, rollout = stored.spec.name, stored.spec.num_parameters, stored.rollout
    file = SHARED if (folder / SHARED).is_file() else None
    found = [ModelVersion("shared", name, size, stored.state.rounds_done, file)]
    if rollout is not None and rollout.approved:
        found.append(ModelVersion("approved", name, size, rollout.approved))
    if rollout is not None and rollout.trial:
        found.append(ModelVersion("trial", name, size, rollout.trial))
    return tuple(found)


@dataclass(frozen=True)
class _Stored:
    """The content of a run's store, read in one transaction."""

    settings: RunSettings
    spec: ModelSpec
    state: EngineState
    ledger: Ledger
    records: Sequence[RoundRecord]
    rollout: Rollout | None
    outage: Outage | None
    troubles: tuple[str, ...]
    running: bool

    @classmethod
    def read(cls, folder: Path, *, recent: bool = False) -> "_Stored":
        """Read the store; `recent` limits the closed rounds to those that `status` needs."""
        running = is_claimed(folder)
        with stored_run(folder) as run:
            state = read_engine(run.store) or EngineState()
            # adoption figures come from each device's latest reply
            some = recent and not run.settings.adoption.enabled
            last = state.round_attempt.number + 1
            return cls(
                settings=run.settings,
                spec=run.enrolment.spec,
                state=state,
                ledger=read_ledger(run.store),
                records=list(run.store.records_up_to(last, after=last - LATEST_ROUNDS))
                if some
                else run.store.records(),
                rollout=read_rollout(run.store),
                outage=read_outage(run.store) if running else None,
                troubles=(
                    *read_troubles(run.store).values(),
                    *filter(None, [few_groups_line(run.settings.method, run.enrolment.spec)]),
                ),
                running=running,
            )

    def status(self, now: float | None) -> RunStatus:
        at, state, outage = time.time() if now is None else now, self.state, self.outage
        stopped = not self.running and state.stage != "finished"
        return self._reader().status(
            state,
            self.ledger,
            max(at - state.timing.ahead_s, state.timing.seen_at)
            if self.running
            else state.timing.seen_at,  # the clock may have been set back
            running=self.running,
            rollout=self.rollout,
            problem=_STOPPED if stopped else "" if outage is None else outage.words(at),
            broker_down_since=None if outage is None else outage.since,
            troubles=self.troubles,
        )

    def devices(self) -> tuple[DeviceStatus, ...]:
        return self._reader().devices(self.state, self.ledger, running=self.running)

    def _reader(self) -> StatusReader:
        reader = StatusReader(self.settings, self.spec.num_parameters)
        for record in self.records:
            reader.add(record)
        return reader
