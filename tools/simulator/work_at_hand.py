"""What simulated devices are at, in workers: the fleet's clock waits for it only when it is due."""

from collections.abc import Iterable
from concurrent.futures import Executor, Future

from fleetune.tools.simulator.job import Job, Worked
from fleetune.tools.simulator.simulated_device import Player
from fleetune.tools.simulator.workers import worker


class WorkAtHand:
    """Work that was handed to workers, by the number of its end on the agenda.

    Args:
        executor: runs `tools.simulator.workers.worker.reply`.
        most: payloads handed to it at a time.
    """

    def __init__(self, executor: Executor, most: int) -> None:
        self._executor = executor
        self._most = most
        self._in_flight: list[Future[Worked]] = []
        self._jobs: dict[int, Future[Worked]] = {}

    def hand_out(self, player: Player, job: Job) -> Future[Worked]:
        """Have a device's work done, after what it was at before."""
        if player.job is not None:
            player.job.exception()  # perhaps at a task that was given up: one writer at a time for its state
        while len(self._in_flight) >= self._most:
            self._in_flight.pop(0).exception()
        worked = self._executor.submit(worker.reply, job)
        player.job = worked
        self._in_flight = [*(one for one in self._in_flight if not one.done()), worked]
        return worked

    def note(self, number: int, worked: Future[Worked]) -> None:
        """When its end is due."""
        self._jobs[number] = worked

    def take(self, number: int) -> Worked:
        """What came of it, once it is done."""
        return self._jobs.pop(number).result()

    @property
    def all_done(self) -> list[tuple[int, Worked]]:
        """What came of everything, once all is done."""
        return [(number, job.result()) for number, job in sorted(self._jobs.items())]

    def restore(self, done: Iterable[tuple[int, Worked]]) -> None:
        """Take over what `all_done` told."""
        for number, worked in done:
            self._jobs[number] = future = Future[Worked]()
            future.set_result(worked)
