"""Each round that has ended is written down with how the simulated world stands then, in one transaction."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
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
from fleetune.tools.simulator.simulated_device import SimulatedDevice
from fleetune.tools.simulator.workers.device_files import forget_before, restore


class Checkpoints:
    """What a simulation leaves of its rounds, and what it finds of those before.

    Args:
        run: its store is written to.

    Attributes:
        closed: rounds that have ended, the final evaluation and those taken back among them. Devices' files
            are kept for those who go on from there.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._written = False
        self._forgetting: Thread | None = None
        self._replies = StoredReplies(run.store)
        self.closed = 0

    @property
    def devices(self) -> Path:
        """The folder of devices' states."""
        return self._run.folder / DEVICES

    @contextmanager
    def one_round(self) -> Iterator[None]:
        """All that is written inside is written when it is left, or nothing is.

        Raises:
            StoreError: the disk is full.
        """
        before, self._written = self.closed, False
        with self._run.store.step():
            yield
        if self._written:
            self.settle()
            self._forgetting = Thread(target=forget_before, args=(self.devices, before))
            self._forgetting.start()

    def settle(self) -> None:
        """Wait until no file is kept any more of the round before: they go while the next one is played."""
        if self._forgetting is not None:
            self._forgetting.join()

    def write(
        self,
        world: Callable[[int], Snapshot],
        changed: Iterable[SimulatedDevice],
        answered: Iterable[SimulatedDevice],
    ) -> None:
        """Write down how the world stands, inside `one_round()`.

        Args:
            world: makes what is written, of the number of rounds that have ended.
            changed: devices, since this was called last.
            answered: devices with replies that may be asked for again.
        """
        self._run.controller.write_down()
        write_snapshot(self._run.store, world(self.closed + 1), changed, self._replies)
        for player in answered:
            for made in player.replies.values():
                self._replies.put(player.name, made.work.key, made.reply)
        self._replies.drop_others()
        self.closed, self._written = self.closed + 1, True

    def recall(self, players: Iterable[SimulatedDevice]) -> Snapshot | None:
        """How the world stood when the last round had ended, devices, their files and the coordinator being
        put back to that; None: nothing was written.

        Raises:
            StoreError: it is damaged, or the disk is full.
        """
        store = self._run.store
        snapshot = read_snapshot(store) if self._run.resumed else None
        if snapshot is None:
            return None
        for player, state in read_devices(store, players, self._replies):
            player.restore(state)
        snapshot = with_replies(snapshot, self._replies)
        restore(self.devices, snapshot.closed)
        self._run.controller.recall()
        self.closed = snapshot.closed
        return snapshot
