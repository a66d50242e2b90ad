"""The state of an `Agent`, for programs to read and for people to print."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime

from fleetune.edge_agent.extensions.adoption.deployed_model import ModelRecord, read_deployed
from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.edge_agent.state.deployed_files import DeployedFiles
from fleetune.edge_agent.stream import store_values
from fleetune.edge_agent.stream.sample_requirements import SampleRequirements
from fleetune.edge_agent.stream.sample_store import SampleStore
from fleetune.edge_agent.stream.status import RoleCounts, refused, role_counts
from fleetune.protocols.errors import PacketError
from fleetune.protocols.tasks.anomaly_threshold import FalseAlarms
from fleetune.protocols.tasks.scores import ACCURACY


@dataclass(frozen=True)
class SampleCounts:
    """Numbers of samples on the device, by their part of the split.

    Attributes:
        train, validation, test: number of samples in each part.
        unlabelled: number of samples without a label.
        new: number of training samples that arrived or were labelled since the last training.
        waiting: number of samples that are not on disk yet.
        refused: number of samples refused so far, by kind (docs/streams.md).
    """

    train: int = 0
    validation: int = 0
    test: int = 0
    unlabelled: int = 0
    new: int = 0
    waiting: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        words = f"{self.train:,} to train on, {self.validation:,} to validate, {self.test:,} to test"
        words += f", {self.unlabelled:,} without a label; {self.new:,} new"
        if self.waiting:
            words += f"; {self.waiting:,} not on disk yet"
        refused = ", ".join(f"{count:,} {kind}" for kind, count in sorted(self.refused.items()))
        return f"{words}; not taken: {refused}" if refused else words


@dataclass(frozen=True)
class DeployedModelState:
    """The deployed model, which `predict` uses.

    Attributes:
        version: its number among the models deployed on this device; 0: the run has no [adoption].
        run, round: run and round from which it comes.
        adopted: True if it comes from the fleet; False if this device trained it local-only.
        pinned: True if the owner has pinned it.
        score: name of the run's score; "accuracy" for classification.
        value: that score on the device's own test samples; None if it has none.
        threshold: larger errors are anomalies; None if the task is another.
        words: all of it as text.
        false_alarms: share of normal samples that it calls anomalies; None if unknown.
    """

    version: int
    run: str
    round: int
    adopted: bool
    pinned: bool
    score: str
    value: float | None
    threshold: float | None
    words: str
    false_alarms: FalseAlarms | None = None

    def __str__(self) -> str:
        return f"version {self.version}, {self.words}" if self.version else self.words


@dataclass(frozen=True)
class AgentState:
    """The current state of an agent.

    Attributes:
        fleet, device: names of fleet and device.
        connection: "connected", "connecting", "closed", or "not connected: " and the reason.
        run: id of the run in which it takes part; None if it takes part in none now.
        round: round in which it trains or last trained; 0: none of this run yet.
        training: True if it trains now.
        resting: why it takes no part now; None if it does.
        finished: id of the last run, if it is over and no other has begun; else None.
        samples: numbers of its samples.
        deployed: the model that `predict` uses; None if there is none yet.
        last_error: last error message of this process; None if there was none.
        last_error_at: time of that error.
    """

    fleet: str
    device: str
    connection: str
    run: str | None
    round: int
    training: bool
    resting: str | None
    finished: str | None
    samples: SampleCounts
    deployed: DeployedModelState | None
    last_error: str | None = None
    last_error_at: datetime | None = None

    @property
    def adopted(self) -> bool | None:
        """True if a model of the fleet is deployed, False if a local-only one, None if there is none."""
        return None if self.deployed is None else self.deployed.adopted

    def __str__(self) -> str:
        run = "in no run" if self.run is None else f"run {self.run}, round {self.round}"
        if self.run is None and self.finished is not None:
            run = f"run {self.finished} is over"
        lines = [f"{self.fleet}/{self.device}: {self.connection}; {run}{', training' * self.training}"]
        if self.resting is not None:
            lines.append(f"rests: {self.resting}")
        lines += [f"samples: {self.samples}", f"deploys: {self.deployed or 'no model yet'}"]
        if self.last_error is not None and self.last_error_at is not None:
            lines.append(f"last error, {self.last_error_at:%d %b %H:%M:%S}: {self.last_error}")
        return "\n".join(lines)


class SampleCountsReader:
    """Counts the samples of a device, again only when they change. It works after the store is closed.

    Args:
        store: the device's store.
    """

    def __init__(self, store: SampleStore) -> None:
        self._store = store
        self._known: tuple[object, RoleCounts, dict[str, int]] | None = None

    def read(self, requirements: SampleRequirements, waiting: int) -> SampleCounts:
        """Count the samples that meet the requirements, with `waiting` that are not on disk yet.

        Raises:
            StoreError: the store cannot be read.
        """
        with self._store.reading() as connection:
            change = store_values.get_number(connection, "change"), requirements
        if self._known is None or self._known[0] != change:
            self._known = change, role_counts(self._store, requirements), refused(self._store)
        _, counts, stored = self._known
        every = Counter(stored)
        every.update(self._store.refusals.unsaved)
        return SampleCounts(**asdict(counts), waiting=waiting, refused=dict(every))


class DeployedModelReader:
    """Reads the record of the deployed model, again only when it changes.

    Args:
        store: the device's state.
    """

    def __init__(self, store: AgentStore) -> None:
        self._store, self._files = store, DeployedFiles.next_to(store.deployed)
        self._known: tuple[object, DeployedModelState | None] | None = None

    def read(self) -> DeployedModelState | None:
        """Return the deployed model; None if there is none, or its file is damaged.

        Raises:
            StoreError: a file cannot be read.
        """
        identity = self._store.deployed.identity, self._files.pin.identity
        if self._known is None or self._known[0] != identity:
            try:
                found = read_deployed(self._store.deployed.read())
            except PacketError:
                found = None
            made = None if found is None else _deployed_model_state(found.record, self._files.pinned)
            self._known = identity, made
        return self._known[1]


def _deployed_model_state(record: ModelRecord, pinned: int | None) -> DeployedModelState:
    return DeployedModelState(
        version=record.version,
        run=record.run,
        round=record.round,
        adopted=not record.local_only,
        pinned=pinned is not None and pinned == record.version,
        score=record.score or ACCURACY.name,
        value=record.accuracy,
        threshold=record.threshold,
        words=record.words,
        false_alarms=record.false_alarms,
    )
