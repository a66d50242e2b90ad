"""Runs simulated devices' training in workers; the virtual clock waits for a result only when it is due."""

from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import replace
from functools import partial

from fleetune.coordinator.run.replies import ReadAhead
from fleetune.protocols.errors import PacketError
from fleetune.protocols.update.shared_payload_cache import PayloadContent
from fleetune.tools.simulator.jobs import TrainingJob, TrainingResult
from fleetune.tools.simulator.simulated_device import SimulatedDevice
from fleetune.tools.simulator.workers import worker

_MOST_BYTES_AHEAD = 2**27  # memory limit of replies that are decoded early
# bytes for each entry of the model in such a reply: its values, its reference, and the reference's entries
_BYTES_AN_ENTRY = 14

Read = Callable[[bytes, PayloadContent | None], ReadAhead]


class PendingWork:
    """Training in workers, each found by the number of its `TrainingDone` in the event queue.

    Args:
        executor: runs `tools.simulator.workers.worker.train`.
        most: maximum number of payloads that wait for a worker.
        model_size: number of entries of the run's model.
    """

    def __init__(self, executor: Executor, most: int, model_size: int) -> None:
        self._executor = executor
        self._most = most
        self._most_ahead = _MOST_BYTES_AHEAD // (_BYTES_AN_ENTRY * model_size)
        self._in_flight: list[Future[TrainingResult]] = []
        self._jobs: dict[int, Future[TrainingResult]] = {}
        self._read: dict[str, tuple[bytes, ReadAhead]] = {}

    def start(
        self, device: SimulatedDevice, job: TrainingJob, reading: Callable[[], Read]
    ) -> Future[TrainingResult]:
        """Start a device's training after its previous one, and return its future.

        If memory allows, the reply is decoded as soon as the worker returns it, so that the round need not
        wait for the decoding later.
        """
        if device.job is not None:
            # the previous training may belong to an abandoned task; the device's state has one writer at a
            # time
            device.job.exception()
        while len(self._in_flight) >= self._most:
            self._in_flight.pop(0).exception()
        reads = len(self._read) + len(self._in_flight) < self._most_ahead
        training = self._executor.submit(worker.train, replace(job, near=reads))
        device.job = training
        self._in_flight = [*(one for one in self._in_flight if not one.done()), training]
        if reads:
            training.add_done_callback(partial(self._read_reply, device.name, [reading()]))
        return training

    def note_end(self, number: int, training: Future[TrainingResult]) -> None:
        """Store the number in the event queue under which the training ends."""
        self._jobs[number] = training

    def take(self, number: int) -> TrainingResult:
        """Wait for the training that ends under that number in the event queue; return its result."""
        return self._jobs.pop(number).result()

    def _read_reply(self, device: str, readers: list[Read], job: Future[TrainingResult]) -> None:
        """Decode a reply in the thread that waited for its worker.

        The thread holds its arguments for a long time. So the reader is passed in a list, from which it is
        removed.
        """
        read = readers.pop()
        if job.cancelled() or job.exception() is not None:
            return
        result = job.result()
        if result.reply is not None:
            with suppress(PacketError):  # the coordinator decodes the reply again and reports the error
                self._read[device] = result.reply, read(result.reply, result.sent)
        object.__setattr__(result, "sent", None)  # the reader is used up, and as large as the model

    def take_read(self, device: str, reply: bytes) -> ReadAhead | None:
        """Return the decoded form of exactly this reply; None if it was not decoded, or was discarded."""
        data, read = self._read.pop(device, (b"", None))
        return read if data is reply else None

    def forget_read(self) -> None:
        """Discard decoded replies when a round closes, because they are unlikely to be used."""
        self._read.clear()

    @property
    def results(self) -> list[tuple[int, TrainingResult]]:
        """Wait for all results, and return them by number."""
        return [(number, replace(job.result(), sent=None)) for number, job in sorted(self._jobs.items())]

    def restore(self, results: Iterable[tuple[int, TrainingResult]]) -> None:
        """Restore `results` that a checkpoint stored."""
        for number, result in results:
            self._jobs[number] = future = Future[TrainingResult]()
            future.set_result(result)
