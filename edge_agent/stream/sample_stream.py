"""A device's data that grow, as the agent sees them: feeders that keep samples, snapshots for its rounds."""

import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fleetune.edge_agent.datasets.log_mel import LogMel, log_mel_options
from fleetune.edge_agent.datasets.sources import KINDS
from fleetune.edge_agent.stream import snapshot
from fleetune.edge_agent.stream.intakes.generator import Generator, GeneratorIntake, find_generator
from fleetune.edge_agent.stream.intakes.local_socket import SocketIntake
from fleetune.edge_agent.stream.intakes.mqtt import MqttIntake, SensorTopic, sensor_topic
from fleetune.edge_agent.stream.retention import RetentionLimits
from fleetune.edge_agent.stream.sample_requirements import Part, SampleRequirements
from fleetune.edge_agent.stream.sample_store import SampleStore
from fleetune.edge_agent.stream.snapshot import Arrays, SnapshotCounts
from fleetune.edge_agent.stream.store_values import TrainingRound
from fleetune.protocols.errors import DataError, SettingError, StoreError, TrainingStopped

WATCH, INTAKE = "watch", "intake:"
SAVE_COUNTS_S = 600.0

log = logging.getLogger(__name__)


class TooFewSamples(DataError):  # noqa: N818 - reads as the verdict on the store
    """There are not at least one sample to train on and one to test on: there may be soon."""


@dataclass(frozen=True)
class StreamSettings:
    """What a device's owner says of its stream.

    Attributes:
        bounds: what is kept.
        labels: names of a table's columns that are the label.
        socket: path of the local intake; None: there is none.
        memory_bytes: that the agent may take, with the process that decodes files; None: not known.
    """

    bounds: RetentionLimits = RetentionLimits()  # noqa: RUF009 - frozen
    labels: tuple[str, ...] = ("label",)
    socket: Path | None = None
    memory_bytes: int | None = None


class SampleIntake(Protocol):
    """Brings samples into the store, in a thread of its own."""

    def run(self, stopped: threading.Event) -> None: ...


@dataclass(frozen=True)
class DataStatistics:
    """What a device tells of its data beside their number.

    Attributes:
        num_samples: to train on.
        new_samples: of these, since the last training.
        drift: see `edge_agent.stream.drift`; None: it cannot tell yet.
    """

    num_samples: int
    new_samples: int
    drift: float | None


def is_stream(source: str) -> bool:
    """Whether `--data` names data that grow.

    Raises:
        DataError: it names a module that cannot be imported, or has wrong options.
    """
    return _kind(source) is not None


@dataclass(frozen=True)
class _Watched:
    folder: Path
    sounds: LogMel


def _kind(source: str) -> str | _Watched | SensorTopic | Generator | None:
    kind, _, rest = source.partition(":")
    if source == INTAKE:
        return INTAKE
    if kind == WATCH:
        return _watched(source, rest)
    if (topic := sensor_topic(source)) is not None:
        return topic
    return None if kind in {*KINDS, "digits", ""} or not rest else find_generator(source)


def _watched(source: str, rest: str) -> _Watched:
    name, _, options = rest.partition("?")
    sounds, unknown = log_mel_options(source, options)
    if unknown:
        raise DataError(
            f"{source}: no option {min(unknown)!r}; there are {', '.join(LogMel.__struct_fields__)}"
        )
    return _Watched(Path(name).expanduser(), sounds)


def without_password(source: str) -> str:
    """A stream's source, fit to be shown. Raises DataError."""
    kind = _kind(source)
    return str(kind) if isinstance(kind, SensorTopic) else source


def check_stream(source: str) -> None:
    """All that can be said of a stream before it runs. Raises DataError."""
    kind = _kind(source)
    if isinstance(kind, _Watched) and not kind.folder.is_dir():
        raise DataError(f"{source}: there is no folder {kind.folder.absolute()}; make it, it may be empty")


class SampleStream:
    """The store of a device and what feeds it.

    Args:
        store: of the device; closed with the stream.
        source: as the owner wrote it.
        settings: of the owner.

    Raises:
        DataError: the source is missing, or no stream.
        SettingError: the socket's path cannot be listened on.
    """

    def __init__(self, store: SampleStore, source: str, settings: StreamSettings) -> None:
        check_stream(source)
        self.store, self.source = store, without_password(source)
        self._stopped = threading.Event()
        self._feeders: list[SampleIntake] = []
        match _kind(source):
            case _Watched(folder, sounds):
                self._feeders.append(_watched_folder(store, folder, sounds, settings))
            case SensorTopic() as topic:
                self._feeders.append(MqttIntake(store, topic))
            case None:
                raise DataError(f"{source}: is no stream; see docs/streams.md")
            case str():
                pass
            case generator:
                self._feeders.append(GeneratorIntake(store, generator, source))
        if settings.socket is not None:
            self._feeders.append(SocketIntake(store, settings.socket))
        self._threads = [
            threading.Thread(target=one.run, args=(self._stopped,), name=type(one).__name__, daemon=True)
            for one in [*self._feeders, self]
        ]

    def start(self) -> None:
        """TableColumns the store, until `close`."""
        for thread in self._threads:
            thread.start()
        log.info("samples of %s are kept in %s", self.source, self.store.path)

    def run(self, stopped: threading.Event) -> None:
        """Now and then: counts are written, and what is too old goes, also where nothing comes."""
        while not stopped.wait(SAVE_COUNTS_S):
            try:
                self.store.save_counts()
            except StoreError as problem:
                self.store.refusals.add("disk", str(problem))

    def close(self) -> None:
        """Feeders end; what they took is kept."""
        self._stopped.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(5.0)
        self.store.close()

    def figures(self, wanted: SampleRequirements) -> DataStatistics:
        """What there is just now. Raises StoreError."""
        num_samples, new_samples = snapshot.count_training_samples(self.store, wanted)
        return DataStatistics(num_samples, new_samples, self.store.drift.figure)

    def newest(self, wanted: SampleRequirements) -> tuple[dict[Part, Arrays], SnapshotCounts]:
        """All samples as they are just now, for no round.

        Raises:
            TooFewSamples: none to train on, or none to test on.
            StoreError: the store cannot be read.
        """
        parts, counted = snapshot.read(self.store, wanted, self.store.change)
        if not counted.parts["train"] or not counted.parts["test"]:
            waiting = "; samples wait for their labels" if counted.unlabelled else ""
            unfit = "; others are of another shape, or of labels that it has not" if counted.unfit else ""
            words = "no samples yet to train on and to test on, one of each at least"
            raise TooFewSamples(f"{self.source}: {words}{waiting}{unfit}")
        return parts, counted

    def round_samples(self, wanted: SampleRequirements, turn: TrainingRound) -> dict[Part, Arrays]:
        """The samples of a round: the same however often it is asked for, also after a crash.

        Raises:
            TrainingStopped: there is nothing to train on.
            StoreError: the store cannot be read or written.
        """
        pin = self.store.pin(turn)
        if not pin.whole:
            log.warning("round %d: some of its samples were removed; it trains on those left", turn.round)
        parts, counted = snapshot.read(self.store, wanted, pin.change)
        if not counted.parts["train"]:
            raise TrainingStopped(f"{self.source}: no samples to train on just now")
        many, new = counted.parts["train"], counted.new
        log.info("round %d: %d samples to train on, %d of them new", turn.round, many, new)
        return parts


def _watched_folder(
    store: SampleStore, folder: Path, sounds: LogMel, settings: StreamSettings
) -> SampleIntake:
    """Imported only where one is watched: most agents never decode files."""
    from fleetune.edge_agent.stream.intakes.watched_folder import WatchedFolder

    memory_bytes = settings.memory_bytes
    return WatchedFolder(store, folder, settings.labels, sounds=sounds, memory_bytes=memory_bytes)


def open_stream(path: Path, source: str, settings: StreamSettings) -> SampleStream:
    """The stream of a device whose samples are kept in the file `path`.

    Raises:
        DataError, SettingError: see `SampleStream`.
        StoreError: the store cannot be opened, is damaged, or of a newer program.
    """
    check_stream(source)
    store = SampleStore.open(path, settings.bounds)
    try:
        return SampleStream(store, source, settings)
    except (DataError, SettingError):
        store.close()
        raise
