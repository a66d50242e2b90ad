"""Stores each closed round together with the simulation's state, in one transaction."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread

from fleetune.coordinator.run.stored_run import Run
from fleetune.coordinator.store.run_folder import DEVICES
from fleetune.tools.simulator.checkpoint.snapshot import (
    Snapshot,
    read_devices,
    read_snapshot,
    with_replies,
    write_snapshot,
)
from fleetune.tools.simulator.checkpoint.stored_replies import StoredReplies
from fleetune.tools.simulator.simulated_device import Fleet
from fleetune.tools.simulator.workers.device_files import forget_before, restore


class Checkpoints:
    """The checkpoints of one simulation.

    Args:
        run: run whose store holds the checkpoints.

    Attributes:
        num_closed: number of ended rounds, the final evaluation and rolled-back rounds included. Devices'
            files are stored under this number, so that a resumed run can restore them.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._devices = run.folder / DEVICES
        self._written = False
        self._forgetting: Thread | None = None
        self._replies = StoredReplies(run.store)
        self.num_closed = 0

    @contextmanager
    def one_round(self) -> Iterator[None]:
        """Put all writes inside this context into one transaction.

        Raises:
            StoreError: the disk is full.
        """
        before, self._written = self.num_closed, False
        with self._run.store.step():
            yield
        if self._written:
            self.settle()
            self._forgetting = Thread(target=forget_before, args=(self._devices, before))
            self._forgetting.start()

    def settle(self) -> None:
        """Wait until the files of the previous round are deleted; a thread deletes them during the next
        round.
        """
        if self._forgetting is not None:
            self._forgetting.join()

    def write(self, snapshot: Callable[[int], Snapshot], fleet: Fleet) -> None:
        """Store a checkpoint, inside `one_round()`.

        Args:
            snapshot: function that creates the snapshot from the number of ended rounds.
            fleet: fleet whose changed devices are stored, too.
        """
        self._run.controller.write_down()
        write_snapshot(self._run.store, snapshot(self.num_closed + 1), fleet.take_changed(), self._replies)
        for device in fleet.with_replies:
            for made in device.replies.values():
                self._replies.put(device.name, made.work.key, made.reply)
        self._replies.drop_others()
        self.num_closed, self._written = self.num_closed + 1, True

    def restore(self, fleet: Fleet) -> Snapshot | None:
        """Restore devices, their files and the coordinator from the latest checkpoint; None if there is none.

        Raises:
            StoreError: the checkpoint is damaged or of another version, or the disk is full.
        """
        store = self._run.store
        snapshot = read_snapshot(store) if self._run.resumed else None
        if snapshot is None:
            return None
        for device, state in read_devices(store, fleet, self._replies):
            fleet.restore(device, state)
        snapshot = with_replies(snapshot, self._replies)
        restore(self._devices, snapshot.num_closed)
        self._run.controller.recall()
        self.num_closed = snapshot.num_closed
        return snapshot
