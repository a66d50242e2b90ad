"""Downsampling of an open run's history, so that its store does not grow with the number of rounds.

The newest rounds are kept completely. Of earlier rounds every second, fourth, eighth ... is kept, so that at
most the same number remains. Dropped rounds are first added to the sums in the ledger (`records.Past`) and
written to `rounds-past.jsonl`, in order, each once. The store notes how much of that file is written, in the
same step; anything beyond it, left by a crash, is cut off. When the file has `MOST_BYTES`, it is renamed to
`rounds-past.jsonl.1` and replaces the file of that name.
"""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Self

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from fleetune.coordinator.extensions.extension import ClosedRound, Extension, RunContext, StateSlot
from fleetune.coordinator.rounds.records import Ledger, Past, RoundRecord, lines_of
from fleetune.coordinator.store.run_folder import PAST
from fleetune.coordinator.store.run_store import RunStore
from fleetune.protocols import disk
from fleetune.protocols.errors import StoreError
from fleetune.protocols.files import append, seal, write_atomically
from fleetune.protocols.method.method import DeviceId

log = logging.getLogger(__name__)

MOST_WHOLE = 1000  # rounds
LEAST_WHOLE = 20
# device records in the rounds that are kept completely; a large fleet keeps fewer rounds
MOST_REPLIES = 100_000
MOST_BYTES = 64 * 2**20
_WRITTEN = "past"  # its name in the store


class Written(Struct, frozen=True):
    """What `rounds-past.jsonl` holds.

    Attributes:
        number: number of the last round in it.
        num_bytes: length of the file.
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
        """Drop old rounds after this one has closed, inside `store.step()`; changes `ledger`.

        If the file cannot be written, nothing is dropped, and a later round tries again.
        """
        whole = max(LEAST_WHOLE, min(self._most_whole, MOST_REPLIES // max(1, len(newest.devices))))
        last = newest.number - whole
        if last < 1 or newest.number % max(1, whole // 10):  # log it once, not each time
            return
        try:
            self._write_past(last)
        except (OSError, StoreError) as problem:
            log.warning("old rounds stay in %s: %s", self._store.path, problem)
            return
        for record in self._store.records_up_to(last, but_every=stride(last, whole)):
            ledger.past = added(ledger.past, record)
            self._store.drop_record(record.number)

    def forget(self, device: DeviceId) -> None:
        # The file goes first. Should the step of the store be lost, the file is shorter than noted, and the
        # repeated removal takes all of it.
        written, last = self._slot.read(), self._path.with_name(f"{PAST}.1")
        if last.exists():
            _rewrite(last, device)
        if self._path.exists():
            num_bytes = _rewrite(self._path, device, written.num_bytes)
            self._slot.write(Written(written.number, num_bytes))

    def _write_past(self, last: int) -> None:
        written = self._slot.read()
        size = self._path.stat().st_size if self._path.exists() else 0
        # shorter than noted: a new file was begun, see below
        at = written.num_bytes if written.num_bytes <= size else 0
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


def _rewrite(path: Path, device: DeviceId, most: int | None = None) -> int:
    """Remove a device from the lines of a file, of which only the first `most` bytes count; return its new
    length.
    """
    data = path.read_bytes()
    if most is not None and most <= len(data):
        data = data[:most]
    lines = [
        _without(line, device) if device.encode() in line else line for line in data.splitlines(keepends=True)
    ]
    write_atomically(path, lines)
    return sum(map(len, lines))


def _without(line: bytes, device: DeviceId) -> bytes:
    record = msgspec.json.decode(line, type=RoundRecord)
    devices = {one: row for one, row in record.devices.items() if one != device}
    participants = tuple(one for one in record.participants if one != device)
    return lines_of([replace(record, devices=devices, participants=participants)])


def stride(last: int, most: int) -> int:
    """Return the power of two whose multiples are the rounds to keep up to `last`: at most `most` rounds."""
    step = 1
    while last // step > most:
        step *= 2
    return step


def added(past: Past | msgspec.UnsetType, record: RoundRecord) -> Past:
    """Return the sums over dropped rounds, with one more round."""
    before = past if isinstance(past, Past) else Past()
    taken = [reply.actual for reply in record.devices.values()]

    def total(known: float | None, *figures: float | None) -> float | None:
        reported = [figure for figure in (known, *figures) if figure is not None]
        return sum(reported) if reported else None

    return Past(
        before.rounds + 1,
        total(before.joules, *(one.joules for one in taken)),
        total(before.train_s, *(one.train_s for one in taken)),
        total(before.upload_s, *(one.upload_s for one in taken)),
        total(before.download_s, *(one.download_s for one in taken)),
    )
