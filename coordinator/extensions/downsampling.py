"""What an open run lets go of: its store, and all that is made from it, stay as large as they are.

The newest rounds are kept whole, of earlier ones every second, fourth, eighth ..., so that at most as many
again are left. What is let go of is added up in the ledger (`records.Past`), so that sums go on being of all
rounds. Before that it is written to `rounds-past.jsonl`, in order, each once: how far is noted in the store,
in the step that lets go, and what a crash left beyond that in the file is cut off. When the file is
`MOST_BYTES` long it becomes `rounds-past.jsonl.1`, in place of the one before.
"""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Self

import msgspec
from msgspec import Struct

from fleetune.coordinator.extensions.extension import ClosedRound, Extension, RunContext, StateSlot
from fleetune.coordinator.rounds.records import Ledger, Past, RoundRecord, lines_of
from fleetune.coordinator.store.run_folder import PAST
from fleetune.coordinator.store.run_store import RunStore
from fleetune.protocols import disk
from fleetune.protocols.errors import StoreError
from fleetune.protocols.files import append, seal

log = logging.getLogger(__name__)

MOST_WHOLE = 1000  # rounds
LEAST_WHOLE = 20
MOST_REPLIES = 100_000  # in the rounds that are whole; a large fleet keeps fewer of them
MOST_BYTES = 64 * 2**20
_WRITTEN = "past"  # its name in the store


class Written(Struct, frozen=True):
    """How much is in the file.

    Attributes:
        number: of the last round.
        num_bytes: of the file.
    """

    number: int = 0
    num_bytes: int = 0


class Downsampling(Extension):
    """Keeps the store of an open run from growing with its rounds.

    Args:
        store: of the run.
        folder: of the run.
        most_whole: rounds that are kept whole; None: `MOST_WHOLE`.
    """

    slots = (_WRITTEN,)

    def __init__(self, store: RunStore, folder: Path, most_whole: int | None = None) -> None:
        self._store = store
        self._slot = StateSlot(store, _WRITTEN, Written, Written())
        self._path = folder / PAST
        self._most_whole = most_whole or MOST_WHOLE

    @classmethod
    def of_run(cls, run: RunContext) -> Self | None:
        return cls(run.store, run.store.path.parent) if run.settings.run.is_open else None

    def after_round(self, closed: ClosedRound) -> Iterable[str]:
        self.closed(closed.record, closed.ledger)
        return ()

    def closed(self, newest: RoundRecord, ledger: Ledger) -> None:
        """Let go of what is too much after this round, inside `store.step()`; `ledger` is changed.

        Where the file cannot be written, nothing is let go of, and it is tried again later.
        """
        whole = max(LEAST_WHOLE, min(self._most_whole, MOST_REPLIES // max(1, len(newest.devices))))
        last = newest.number - whole
        if last < 1 or newest.number % max(1, whole // 10):  # not each time
            return
        try:
            self._write_past(last)
        except (OSError, StoreError) as problem:
            log.warning("old rounds stay in %s: %s", self._store.path, problem)
            return
        for record in self._store.records_up_to(last, but_every=stride(last, whole)):
            ledger.past = added(ledger.past, record)
            self._store.drop_record(record.number)

    def _write_past(self, last: int) -> None:
        written = self._slot.read()
        size = self._path.stat().st_size if self._path.exists() else 0
        at = written.num_bytes if written.num_bytes <= size else 0  # shorter: it is new, see below
        if size > at:
            disk.DISK.truncate(self._path, at)
        records = self._store.records_up_to(last, after=written.number)
        lines = lines_of(list(records))
        if at and at + len(lines) > MOST_BYTES:
            disk.DISK.rename(self._path, self._path.with_name(f"{PAST}.1"))
            at = 0
        append(self._path, lines, at=at)
        seal(self._path)
        self._slot.write(Written(last, at + len(lines)))


def stride(last: int, most: int) -> int:
    """Of the rounds up to `last` those are kept whose number this power of two divides: `most` at most."""
    step = 1
    while last // step > most:
        step *= 2
    return step


def added(past: Past | msgspec.UnsetType, record: RoundRecord) -> Past:
    """What was let go of, with one more round."""
    before = past if isinstance(past, Past) else Past()
    taken = [reply.actual for reply in record.devices.values()]

    def total(known: float | None, *figures: float | None) -> float | None:
        told = [figure for figure in (known, *figures) if figure is not None]
        return sum(told) if told else None

    return Past(
        before.rounds + 1,
        total(before.joules, *(one.joules for one in taken)),
        total(before.train_s, *(one.train_s for one in taken)),
        total(before.upload_s, *(one.upload_s for one in taken)),
        total(before.download_s, *(one.download_s for one in taken)),
    )
