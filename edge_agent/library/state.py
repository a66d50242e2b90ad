"""What stands with an Agent just now: the part of it that a program looks at, and a person prints."""

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
    """Samples of the device, by what they are for.

    Attributes:
        train, validation, test: how many are kept.
        unlabelled: how many wait for a label.
        new: of those to train on, how many came or got their label since the last training.
        waiting: how many are on their way to the disk.
        refused: by kind (docs/streams.md), how many were not taken, of all that ever came.
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
            words += f"; {self.waiting:,} on their way"
        refused = ", ".join(f"{count:,} {kind}" for kind, count in sorted(self.refused.items()))
        return f"{words}; not taken: {refused}" if refused else words


@dataclass(frozen=True)
class DeployedModelState:
    """The model that `predict` asks.

    Attributes:
        version: its number among those that this device has served; 0: the run has no [adoption], and it
            has none.
        run, round: where it comes from.
        adopted: it comes from the fleet; False: this device has trained it alone.
        pinned: its owner has pinned it.
        score: name of the run's score; "accuracy" for classification.
        value: that score on the device's own test samples; None: it has none.
        threshold: errors above are anomalies; None: of another task.
        false_alarms: how often it calls normal samples anomalies; None: not known.
        words: all of it, for people.
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
    """What stands just now.

    Attributes:
        fleet, device: names.
        connection: "connected", "connecting", "closed", or "not connected: " and why.
        run: id of the run that it takes part in; None: none just now.
        round: that it trains in or trained in last; 0: none of this run yet.
        training: whether it trains just now.
        resting: why it takes no part just now; None: nothing is in the way.
        finished: id of the run that is over; None: none is, or another has begun.
        samples: of the device.
        served: the model that `predict` asks; None: there is none yet.
        last_error: the last thing that went wrong, in a line; None: nothing has, in this process.
        last_error_at: when that was.
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
    served: DeployedModelState | None
    last_error: str | None = None
    last_error_at: datetime | None = None

    @property
    def adopted(self) -> bool | None:
        """Whether a model of the fleet is served; False: one trained alone; None: none is."""
        return None if self.served is None else self.served.adopted

    def __str__(self) -> str:
        run = "in no run" if self.run is None else f"run {self.run}, round {self.round}"
        if self.run is None and self.finished is not None:
            run = f"run {self.finished} is over"
        lines = [f"{self.fleet}/{self.device}: {self.connection}; {run}{', training' * self.training}"]
        if self.resting is not None:
            lines.append(f"rests: {self.resting}")
        lines += [f"samples: {self.samples}", f"serves: {self.served or 'no model yet'}"]
        if self.last_error is not None and self.last_error_at is not None:
            lines.append(f"last error, {self.last_error_at:%d %b %H:%M:%S}: {self.last_error}")
        return "\n".join(lines)


class SampleCountsReader:
    """What is known of the samples that a device keeps, counted again when they change; works on when the
    store is closed.

    Args:
        store: of the device.
    """

    def __init__(self, store: SampleStore) -> None:
        self._store = store
        self._known: tuple[object, RoleCounts, dict[str, int]] | None = None

    def read(self, wanted: SampleRequirements, waiting: int) -> SampleCounts:
        """The counts, for a model that wants this; `waiting`: are on their way.

        Raises:
            StoreError: the store cannot be read.
        """
        with self._store.reading() as connection:
            change = store_values.get_number(connection, "change"), wanted
        if self._known is None or self._known[0] != change:
            self._known = change, role_counts(self._store, wanted), refused(self._store)
        _, counts, kept = self._known
        every = Counter(kept)
        every.update(self._store.refusals.unsaved)
        return SampleCounts(**asdict(counts), waiting=waiting, refused=dict(every))


class DeployedModelReader:
    """What is known of the model that a device serves, read again when it changes.

    Args:
        store: of the device.
    """

    def __init__(self, store: AgentStore) -> None:
        self._store, self._files = store, DeployedFiles.next_to(store.deployed)
        self._known: tuple[object, DeployedModelState | None] | None = None

    def read(self) -> DeployedModelState | None:
        """It; None: there is none, or it cannot be read.

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
