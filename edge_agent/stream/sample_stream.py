"""The stream of a device as the agent sees it: intakes that store samples, and snapshots for rounds."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from fleetune.edge_agent.datasets.csv_files import base_folder
from fleetune.edge_agent.datasets.formats import FORMATS
from fleetune.edge_agent.datasets.log_mel import LogMel, log_mel_options
from fleetune.edge_agent.datasets.series_options import SeriesOptions, series_options
from fleetune.edge_agent.datasets.source_options import name_list
from fleetune.edge_agent.stream import snapshot
from fleetune.edge_agent.stream.intakes.generator import Generator, GeneratorIntake, find_generator
from fleetune.edge_agent.stream.intakes.mqtt import MqttIntake, SensorTopic, sensor_topic
from fleetune.edge_agent.stream.retention import RetentionLimits
from fleetune.edge_agent.stream.sample_requirements import Part, SampleRequirements
from fleetune.edge_agent.stream.sample_store import SampleStore
from fleetune.edge_agent.stream.snapshot import Arrays, SnapshotCounts
from fleetune.edge_agent.stream.store_values import TrainingRound
from fleetune.protocols.errors import DataError, StoreError, TrainingStopped

WATCH, INTAKE = "watch", "intake:"
SAVE_COUNTS_S = 600.0
_TRY_POLL_S = 0.05

log = logging.getLogger(__name__)


class TooFewSamples(DataError):  # noqa: N818 - reads as the verdict on the store
    """The stream has no sample to train on yet, or none to test on."""


@dataclass(frozen=True)
class StreamSettings:
    """The owner's settings of a stream.

    Attributes:
        bounds: limits on what the store keeps.
        labels: names of the label columns of tables.
        memory_bytes: memory of the agent together with its decoder process; None if unknown.
        trial: True if the samples are only looked at: a broker must remember nothing.
    """

    bounds: RetentionLimits = RetentionLimits()  # noqa: RUF009 - frozen
    labels: tuple[str, ...] = ("label",)
    memory_bytes: int | None = None
    trial: bool = False


class SampleIntake(Protocol):
    """Brings samples into the store, in a thread of its own."""

    def run(self, stopped: threading.Event) -> None: ...


@runtime_checkable
class ReadsNow(Protocol):
    """An intake that can store what is there now, without waiting."""

    def read_now(self, is_enough: Callable[[], bool]) -> None: ...


@dataclass(frozen=True)
class DataStatistics:
    """What a device reports about its data.

    Attributes:
        num_samples: number of training samples.
        new_samples: number of training samples that arrived since the last training.
        drift: result of the drift tests, see `edge_agent.stream.drift`; None if unknown yet.
    """

    num_samples: int
    new_samples: int
    drift: float | None


def is_stream(source: str) -> bool:
    """True if `--data` names a stream rather than a data set.

    Raises:
        DataError: its module cannot be imported, or its options are wrong.
    """
    return _parse_source(source) is not None


@dataclass(frozen=True)
class _Watched:
    place: Path
    options: SeriesOptions
    sounds: LogMel


def _parse_source(source: str) -> str | _Watched | SensorTopic | Generator | None:
    kind, _, rest = source.partition(":")
    if source == INTAKE:
        return INTAKE
    if kind == WATCH:
        return _watched(source, rest)
    if (topic := sensor_topic(source)) is not None:
        return topic
    return None if kind in {*FORMATS, "digits", ""} or not rest else find_generator(source)


def _watched(source: str, rest: str) -> _Watched:
    name, _, text = rest.partition("?")
    sounds, others = log_mel_options(source, text)
    return _Watched(Path(name).expanduser(), series_options(source, others, SeriesOptions), sounds)


def without_password(source: str) -> str:
    """Return the source of a stream without its password, for messages. Raises DataError."""
    kind = _parse_source(source)
    return str(kind) if isinstance(kind, SensorTopic) else source


def stream_columns(source: str) -> tuple[str, ...]:
    """Return the columns that a stream's source names; empty if it names none. Raises DataError."""
    kind = _parse_source(source)
    options = kind.options if isinstance(kind, _Watched | SensorTopic) else None
    return tuple(name_list(options.columns)) if options else ()


def check_stream(source: str) -> None:
    """Check a stream's source before it starts. Raises DataError."""
    kind = _parse_source(source)
    if isinstance(kind, _Watched) and not (folder := base_folder(kind.place)).is_dir():
        raise DataError(f"{source}: there is no folder {folder.absolute()}; create it (it may be empty)")


class SampleStream:
    """A device's store with the intakes that fill it.

    Args:
        store: the device's store; it is closed with the stream.
        source: the source as its owner wrote it.
        settings: the owner's settings.

    Raises:
        DataError: the source is not a stream, or its folder does not exist.
    """

    def __init__(self, store: SampleStore, source: str, settings: StreamSettings) -> None:
        check_stream(source)
        self.store, self.source = store, without_password(source)
        self._stopped = threading.Event()
        self._intakes: list[SampleIntake] = []
        match _parse_source(source):
            case _Watched() as watched:
                self._intakes.append(_watched_folder(store, watched, settings))
            case SensorTopic() as topic:
                self._intakes.append(MqttIntake(store, topic, trial=settings.trial))
            case None:
                raise DataError(f"{source} is not a stream; see docs/streams.md for the sources of streams")
            case str():
                pass
            case generator:
                self._intakes.append(GeneratorIntake(store, generator, source))
        self._threads = [
            threading.Thread(target=one.run, args=(self._stopped,), name=type(one).__name__, daemon=True)
            for one in [*self._intakes, self]
        ]

    def start(self) -> None:
        """Start the intakes."""
        for thread in self._threads:
            thread.start()
        log.info("samples of %s are stored in %s", self.source, self.store.path)

    def try_out(self, is_enough: Callable[[], bool], seconds: float) -> None:
        """Store the first samples, without starting the stream: the files that are there, or what comes.

        Args:
            is_enough: called often; True ends this.
            seconds: longest time to wait for samples that are no files.
        """
        give_up_at = time.monotonic() + seconds
        for intake in self._intakes:
            if isinstance(intake, ReadsNow):
                intake.read_now(is_enough)
                return
        for thread in self._threads[:-1]:
            thread.start()
        while not is_enough() and time.monotonic() < give_up_at:
            time.sleep(_TRY_POLL_S)

    def run(self, stopped: threading.Event) -> None:
        """Save the counts and evict old samples every `SAVE_COUNTS_S`, even if no sample arrives."""
        while not stopped.wait(SAVE_COUNTS_S):
            try:
                self.store.save_counts()
            except StoreError as problem:
                self.store.refusals.add("disk", str(problem))

    def close(self) -> None:
        """Stop the intakes and close the store. Samples that the intakes have taken are stored first."""
        self._stopped.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(5.0)
        self.store.close()

    def figures(self, requirements: SampleRequirements) -> DataStatistics:
        """Return current counts and drift of the samples that meet the requirements. Raises StoreError."""
        num_samples, new_samples = snapshot.count_training_samples(self.store, requirements)
        return DataStatistics(num_samples, new_samples, self.store.drift.figure)

    def newest(self, requirements: SampleRequirements) -> tuple[dict[Part, Arrays], SnapshotCounts]:
        """Return all samples that are stored now, independent of any round, with their counts.

        Raises:
            TooFewSamples: there is no sample to train on, or none to test on.
            StoreError: the store cannot be read.
        """
        parts, counted = snapshot.read(self.store, requirements, self.store.change)
        if not counted.parts["train"] or not counted.parts["test"]:
            waiting = "; some samples have no label yet" if counted.unlabelled else ""
            unfit = (
                "; some have another shape than the model's, or a label that it does not have"
                if counted.unfit
                else ""
            )
            words = "it needs at least one sample to train on and one to test on"
            raise TooFewSamples(f"{self.source}: {words}{waiting}{unfit}")
        return parts, counted

    def round_samples(
        self, requirements: SampleRequirements, training_round: TrainingRound
    ) -> dict[Part, Arrays]:
        """Return the samples of a round. The same round gets the same samples again, also after a crash.

        Raises:
            TrainingStopped: there are no training samples.
            StoreError: the store cannot be read or written.
        """
        pin = self.store.pin(training_round)
        if not pin.complete:
            log.warning(
                "round %d: some of its samples were removed; it trains on the rest", training_round.round
            )
        parts, counted = snapshot.read(self.store, requirements, pin.change)
        if not counted.parts["train"]:
            raise TrainingStopped(f"{self.source}: there are no samples to train on now")
        num_samples, new = counted.parts["train"], counted.new
        log.info("round %d: %d samples to train on, %d of them new", training_round.round, num_samples, new)
        return parts


def _watched_folder(store: SampleStore, watched: _Watched, settings: StreamSettings) -> SampleIntake:
    """Import the watched folder only where it is used: most agents decode no files."""
    from fleetune.edge_agent.stream.intakes.watched_folder import WatchedFolder

    return WatchedFolder(
        store,
        watched.place,
        settings.labels,
        options=watched.options,
        sounds=watched.sounds,
        memory_bytes=settings.memory_bytes,
    )


def open_stream(path: Path, source: str, settings: StreamSettings) -> SampleStream:
    """Open a device's stream, whose samples are stored in the file `path`.

    Raises:
        DataError: see `SampleStream`.
        StoreError: the store cannot be opened, is damaged, or comes from a newer version.
    """
    check_stream(source)
    store = SampleStore.open(path, settings.bounds)
    try:
        return SampleStream(store, source, settings)
    except DataError:
        store.close()
        raise
