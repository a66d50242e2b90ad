"""What simulated devices are at, in workers: the fleet's clock waits for it only when it is due."""

from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import replace
from functools import partial

from fleetune.coordinator.run.replies import ReadAhead
from fleetune.protocols.errors import PacketError
from fleetune.protocols.update.once import Told
from fleetune.tools.simulator.jobs import TrainingJob, TrainingResult
from fleetune.tools.simulator.simulated_device import SimulatedDevice
from fleetune.tools.simulator.workers import worker

_MOST_BYTES_AHEAD = 2**27  # of replies that are read and not due
_BYTES_AN_ENTRY = 14  # of the model, in such a reply: its values, its base and what that holds

Read = Callable[[bytes, Told | None], ReadAhead]


class PendingWork:
    """Work that was handed to workers, by the number of its end on the agenda.

    Args:
        executor: runs `tools.simulator.workers.worker.train`.
        most: payloads handed to it at a time.
        model_size: entries of the run's model.
    """

    def __init__(self, executor: Executor, most: int, model_size: int) -> None:
        self.executor = executor
        self._most = most
        self._most_ahead = _MOST_BYTES_AHEAD // (_BYTES_AN_ENTRY * model_size)
        self._in_flight: list[Future[TrainingResult]] = []
        self._jobs: dict[int, Future[TrainingResult]] = {}
        self._ahead: dict[str, tuple[bytes, ReadAhead]] = {}

    def hand_out(
        self, player: SimulatedDevice, job: TrainingJob, reading: Callable[[], Read]
    ) -> Future[TrainingResult]:
        """Have a device's work done, after what it was at before. What comes of it is read at once, where
        there is room, so that it need not be when a round waits for nothing else.
        """
        if player.job is not None:
            player.job.exception()  # perhaps at a task that was given up: one writer at a time for its state
        while len(self._in_flight) >= self._most:
            self._in_flight.pop(0).exception()
        reads = len(self._ahead) + len(self._in_flight) < self._most_ahead
        worked = self.executor.submit(worker.train, replace(job, near=reads))
        player.job = worked
        self._in_flight = [*(one for one in self._in_flight if not one.done()), worked]
        if reads:
            worked.add_done_callback(partial(self._read_ahead, player.name, [reading()]))
        return worked

    def note(self, number: int, worked: Future[TrainingResult]) -> None:
        """When its end is due."""
        self._jobs[number] = worked

    def take(self, number: int) -> TrainingResult:
        """What came of it, once it is done."""
        return self._jobs.pop(number).result()

    def _read_ahead(self, device: str, once: list[Read], job: Future[TrainingResult]) -> None:
        """In the thread that waited for a worker, which keeps hold of its arguments for long."""
        read = once.pop()
        if job.cancelled() or job.exception() is not None:
            return
        worked = job.result()
        if worked.reply is not None:
            with suppress(PacketError):  # whoever reads it again will say so
                self._ahead[device] = worked.reply, read(worked.reply, worked.sent)
        object.__setattr__(worked, "sent", None)  # it is used up, and takes a model's room

    def take_ahead(self, device: str, reply: bytes) -> ReadAhead | None:
        """What was read of this very reply; None: nothing is known any more."""
        data, ahead = self._ahead.pop(device, (b"", None))
        return ahead if data is reply else None

    def forget_ahead(self) -> None:
        """A round has closed: what nobody took will hardly be asked for."""
        self._ahead.clear()

    @property
    def all_done(self) -> list[tuple[int, TrainingResult]]:
        """What came of everything, once all is done."""
        return [(number, replace(job.result(), sent=None)) for number, job in sorted(self._jobs.items())]

    def restore(self, done: Iterable[tuple[int, TrainingResult]]) -> None:
        """Take over what `all_done` told."""
        for number, worked in done:
            self._jobs[number] = future = Future[TrainingResult]()
            future.set_result(worked)
