"""Samples from a program on the device, ten lines in somebody's sensor loop:

    from fleetune.edge_agent.stream import Intake

    with Intake.open(fleet="motors", device="pump-3") as intake:
        while True:
            x, y = read_sensor()
            intake.add(x, y)

What `add` returns of is on disk. The agent need not run: it finds the samples when it does. Whoever cannot
wait for a disk puts samples into a `SampleQueue`.
"""

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.edge_agent.state.defaults import HOST, STATE
from fleetune.edge_agent.state.state_folder import mark
from fleetune.edge_agent.stream.retention import RetentionLimits
from fleetune.edge_agent.stream.sample import BadSample, Label, Sample, make_label, make_name, make_sample
from fleetune.edge_agent.stream.sample_store import Outcome, SampleStore
from fleetune.protocols.errors import StoreError

WAITING_BYTES = 2**24
AGAIN_S = 5.0
_BATCH = 256
_LOOK_S = 0.2


class Intake:
    """A way into a device's samples. Any thread may call anything.

    Args:
        store: of the device.
    """

    def __init__(self, store: SampleStore) -> None:
        self._store = store

    @classmethod
    def open(
        cls,
        fleet: str,
        device: str = HOST,
        state: Path | str = STATE,
        *,
        bounds: RetentionLimits | None = None,
    ) -> Self:
        """The samples of a device, whose agent may run or not.

        Args:
            fleet: its name, as `edge-agent run` is given it.
            device: likewise.
            state: likewise, the folder.
            bounds: what the store keeps; None: as the agent, or whoever was here last, said.

        Raises:
            StoreError: the store cannot be opened, is damaged, or (StoreVersion) of another format.
        """
        store = AgentStore(Path(state) / fleet / device)
        mark(store.folder)
        return cls(SampleStore.open(store.samples, bounds))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add(self, x: Any, y: Any = None, id: str | int | None = None) -> Outcome:  # noqa: A002 - as users say it
        """Keep a sample; it is on disk when this returns.

        Args:
            x: its input: numbers, any shape but (). uint8 stays (the model sees 0..1), others become float32.
            y: its label: a class, from 0, or numbers; None: it may still come.
            id: a name of yours, by which `label` finds it later.

        Returns:
            "stored"; "known" where this input is there already; "labelled" where it is, and got its label;
            "refused" where it cannot be kept (NaN, no numbers, a label that no model has): that is counted,
            and a line in the log says why. A sensor that fails stops no loop.

        Raises:
            StoreError: the disk is full, or the store cannot be written; nothing was kept.
        """
        return self.add_many([(x, y, id)])[0]

    def add_many(self, samples: Iterable[tuple[Any, Any, str | int | None]]) -> list[Outcome]:
        """Keep several, (x, y, id) each, in one transaction: as durable as `add`, and many times faster.

        Raises:
            StoreError: as `add`; nothing was kept.
        """
        made = [self._made(*sample) for sample in samples]
        outcomes = iter(self._store.add([sample for sample in made if sample is not None]))
        return ["refused" if sample is None else next(outcomes) for sample in made]

    def label(self, id: str | int, y: Any) -> Outcome:  # noqa: A002
        """Give a sample its label, or another one.

        Returns:
            "labelled"; "known" where it has this label; "refused" where there is no such sample, or not any
            more, or no label can be so.

        Raises:
            StoreError: as `add`; nothing was changed.
        """
        return self.label_many([(id, y)])[0]

    def label_many(self, labels: Iterable[tuple[str | int, Any]]) -> list[Outcome]:
        """Several labels, (id, y) each, in one transaction. Raises as `label`."""
        outcomes: list[Outcome | None] = []
        good = []
        for name, y in labels:
            try:
                good.append((make_name(name), make_label(y)))
                outcomes.append(None)
            except BadSample as problem:
                self._store.refuse(problem)
                outcomes.append("refused")
        found = iter(self._store.label(good))
        return [next(found) if outcome is None else outcome for outcome in outcomes]

    def close(self) -> None:
        """Counts of what was refused are kept, and the file is closed."""
        self._store.close()

    def _made(self, x: Any, y: Any, name: str | int | None) -> Sample | None:
        try:
            return make_sample(x, y, name)
        except BadSample as problem:
            self._store.refuse(problem)
            return None


@dataclass(frozen=True)
class NamedLabel:
    """The label of a sample that is known by its name."""

    name: str
    label: Label


class SampleQueue:
    """Samples and labels on their way to the disk, in their order: who puts them does not wait for it.

    What came while the disk was busy is one transaction; on a full disk it stays and is tried again.

    Args:
        store: of the device.
        most_bytes: that may wait, about.
    """

    def __init__(self, store: SampleStore, most_bytes: int = WAITING_BYTES) -> None:
        self._store, self._most_bytes = store, most_bytes
        self._waiting: deque[Sample | NamedLabel] = deque()
        self._num_bytes = 0
        self._ending = False
        self._changed = threading.Condition()

    def __len__(self) -> int:
        """How many wait; those that are being written are among them."""
        return len(self._waiting)

    def put(self, item: Sample | NamedLabel, wait_s: float = 0.0) -> bool:
        """Whether there is room for it by then; any thread may call it."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._num_bytes < self._most_bytes, wait_s):
                return False
            self._waiting.append(item)
            self._num_bytes += _bytes_of(item)
            self._changed.notify_all()
        return True

    def wait_until_kept(self, timeout_s: float | None = None) -> bool:
        """Whether nothing waits any more by then."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout_s)

    def end(self) -> None:
        """`run` need wait for no more."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()

    def run(self, stopped: threading.Event) -> None:
        """Write what waits, until told to stop; then the rest, unless the disk is full."""
        while True:
            batch = self._next()
            if not batch and (self._ending or stopped.is_set()):
                return
            if batch and not self._keep(batch) and stopped.wait(AGAIN_S):
                return

    def _next(self) -> list[Sample | NamedLabel]:
        """The first that wait, all samples or all labels; they go on waiting until they are kept."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._waiting) or self._ending, _LOOK_S)
            kind = type(self._waiting[0]) if self._waiting else None
            found: list[Sample | NamedLabel] = []
            for item in self._waiting:
                if type(item) is not kind or len(found) == _BATCH:
                    break
                found.append(item)
            return found

    def _keep(self, batch: list[Sample | NamedLabel]) -> bool:
        samples = [one for one in batch if isinstance(one, Sample)]
        labels = [(one.name, one.label) for one in batch if isinstance(one, NamedLabel)]
        try:
            if samples:
                self._store.add(samples)
            if labels:
                self._store.label(labels)
        except StoreError as problem:
            self._store.refusals.add("disk", str(problem))
            return False
        with self._changed:
            for item in batch:
                self._waiting.popleft()
                self._num_bytes -= _bytes_of(item)
            self._changed.notify_all()
        return True


def _bytes_of(item: Sample | NamedLabel) -> int:
    return (item.x.nbytes if isinstance(item, Sample) else 0) + 500
