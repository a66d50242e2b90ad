"""Intake by a library call: any program on the device can store samples.

    from fleetune.edge_agent.stream import Intake

    with Intake.open(fleet="motors", device="pump-3") as intake:
        while True:
            x, y = read_sensor()
            intake.add(x, y)

When `add` returns, the sample is on disk. The agent need not run. A program that cannot wait for the disk
can use a `write_queue.SampleQueue`.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.edge_agent.state.defaults import STATE
from fleetune.edge_agent.state.state_folder import mark
from fleetune.edge_agent.stream.retention import RetentionLimits
from fleetune.edge_agent.stream.sample import BadSample, Sample, make_label, make_name, make_sample
from fleetune.edge_agent.stream.sample_store import Outcome, SampleStore


class Intake:
    """Stores samples on a device. Any thread may call any method.

    Args:
        store: the device's store.
    """

    def __init__(self, store: SampleStore) -> None:
        self._store = store

    @classmethod
    def open(
        cls,
        fleet: str,
        device: str | None = None,
        state: Path | str = STATE,
        *,
        bounds: RetentionLimits | None = None,
    ) -> Self:
        """Open the store of a device, whether its agent runs or not.

        Args:
            fleet: name of the fleet, as for `edge-agent run`.
            device: id of the device, as for `edge-agent run --device`; None: that of the fleet's only device
                in `state`, else the machine's name.
            state: folder of agents' state, as for `edge-agent run`.
            bounds: limits on what the store keeps; None for the limits that were set last.

        Raises:
            SettingError: `fleet` or `device` is no valid name; or `device` is None, and several devices of
                the fleet have their state here, but none with the machine's name as its id.
            StoreError: the store cannot be opened, is damaged, or (StoreVersion) has another format.
        """
        store = AgentStore.of(Path(state), fleet, device)
        mark(store.folder)
        return cls(SampleStore.open(store.samples, bounds))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, x: Any, y: Any = None, id: str | int | None = None) -> Outcome:  # noqa: A002 - as users say it
        """Store a sample. It is on disk when this returns.

        Args:
            x: the input: numbers, any shape but (). uint8 stays (the model sees 0..1), others become float32.
            y: the label: a class from 0, or numbers; None if it may be added later.
            id: your name for the sample, by which `label` finds it later.

        Returns:
            "stored"; "known" if this input was stored before; "labelled" if it was, and its label is new;
            "refused" if it is not valid (NaN, no numbers, a label that the model does not have). A refused
            sample is counted and logged, so that a failing sensor stops no loop.

        Raises:
            StoreError: the disk is full, or the store cannot be written. Nothing was stored.
        """
        return self.add_many([(x, y, id)])[0]

    def add_many(self, samples: Iterable[tuple[Any, Any, str | int | None]]) -> list[Outcome]:
        """Store several samples, (x, y, id) each, in one transaction. This is as durable as `add`, but
        faster.

        Raises:
            StoreError: as `add`; nothing was stored.
        """
        made = [self._made(*sample) for sample in samples]
        outcomes = iter(self._store.add([sample for sample in made if sample is not None]))
        return ["refused" if sample is None else next(outcomes) for sample in made]

    def label(self, id: str | int, y: Any) -> Outcome:  # noqa: A002
        """Set or change the label of a sample.

        Returns:
            "labelled"; "known" if the sample has this label already; "refused" if no such sample is stored,
            or the label is not valid.

        Raises:
            StoreError: as `add`; nothing was changed.
        """
        return self.label_many([(id, y)])[0]

    def label_many(self, labels: Iterable[tuple[str | int, Any]]) -> list[Outcome]:
        """Set several labels, (id, y) each, in one transaction. Raises as `label`."""
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
        """Save the counts of refused samples and close the store."""
        self._store.close()

    def _made(self, x: Any, y: Any, name: str | int | None) -> Sample | None:
        try:
            return make_sample(x, y, name)
        except BadSample as problem:
            self._store.refuse(problem)
            return None
