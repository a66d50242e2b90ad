"""Samples from a program on the device, ten lines in somebody's sensor loop:

    from fleetune.edge_agent.stream import Intake

    with Intake.open(fleet="motors", device="pump-3") as intake:
        while True:
            x, y = read_sensor()
            intake.add(x, y)

What `add` returns of is on disk. The agent need not run: it finds the samples when it does.
"""

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fleetune.edge_agent.run_options import HOST, STATE
from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.edge_agent.state.state_folder import mark
from fleetune.edge_agent.stream.retention import Bounds
from fleetune.edge_agent.stream.sample import BadSample, Sample, make_label, make_name, make_sample
from fleetune.edge_agent.stream.sample_store import Outcome, SampleStore


class Intake:
    """A way into a device's samples. Any thread may call anything.

    Args:
        store: of the device.
    """

    def __init__(self, store: SampleStore) -> None:
        self._store = store

    @classmethod
    def open(
        cls, fleet: str, device: str = HOST, state: Path | str = STATE, *, bounds: Bounds | None = None
    ) -> Self:
        """The samples of a device, whose agent may run or not.

        Args:
            fleet: its name, as `edge-agent run` is given it.
            device: likewise.
            state: likewise, the folder.
            bounds: what the store keeps; None: as the agent, or whoever was here last, said.

        Raises:
            StoreError: the store cannot be opened, is damaged, or (StoreVersion) of a newer program.
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
