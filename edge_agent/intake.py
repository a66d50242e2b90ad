"""What comes down to this device, from the offer to the disk: wanted or not, stored, and timed."""

import shutil
from collections.abc import Callable

from edge_agent.store import AgentStore
from protocols.mailbox import Arrived, Inbox
from protocols.messages import Errand, Offer, Refuse
from protocols.parts import part_folder
from protocols.transfer import Reply, digest_of

MAX_PAYLOAD_BYTES = 2**31
SMALL_BYTES = 2**20  # there is always room for so much
COPIES = 2  # at least: in memory packed and unpacked, on disk arriving and kept


class Intake:
    """Enrolments, bundles and tasks from the coordinator.

    Args:
        device: its name.
        store: where payloads are kept.
        is_in: whether this device takes part in a run.
        objection: why it would not work just now; None: it would.
        clock: seconds that never jump.
        memory: bytes that this process may take; None: not known.
    """

    def __init__(
        self,
        device: str,
        store: AgentStore,
        *,
        is_in: Callable[[str], bool],
        objection: Callable[[], str | None],
        clock: Callable[[], float],
        memory: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._memory = memory
        self._store, self._is_in, self._objection, self._clock = store, is_in, objection, clock
        self._inbox = Inbox(
            device,
            part_folder(store.incoming),
            max_bytes=MAX_PAYLOAD_BYTES,
            have=self._have,
            objects=self._objects,
        )
        self._transfer, self._offered_at = "", 0.0
        self._arrived: tuple[str, float] | None = None  # the last transfer that came in whole, and when

    def offer(self, offer: Offer) -> list[Reply | Arrived]:
        """Answer an offer; what it brings may be here already, from before a restart of either side."""
        if (problem := self._has_no_room(offer.num_bytes)) is not None:
            return [Refuse(offer.transfer, problem)]
        if offer.transfer != self._transfer:
            self._transfer, self._offered_at = offer.transfer, self._clock()
        return self._inbox.handle_offer(offer)

    def chunk(self, data: bytes) -> list[Reply | Arrived]:
        """Raises PacketError, StoreError."""
        return self._inbox.handle_chunk(data, self._clock())

    def keep(self, arrived: Arrived) -> None:
        """Put it on disk. Raises StoreError."""
        offer = arrived.offer
        self._arrived = offer.transfer, self._clock()
        if offer.errand.kind == "enrolment":
            self._store.enrolment(offer.errand.run).write(arrived.payload())
        elif offer.errand.kind == "bundle":
            self._store.keep_bundle(offer.errand.run, arrived.payload())
        else:
            self._store.keep_task(offer.errand.run, offer.transfer, arrived.payload())
        self._inbox.settle(offer.transfer)

    def download_s(self, transfer: str) -> float | None:
        """From its offer to its last byte; None: it was not this process that received it."""
        if self._arrived is None or not self._arrived[0] == self._transfer == transfer:
            return None
        return self._arrived[1] - self._offered_at

    def _has_no_room(self, num_bytes: int) -> str | None:
        """Of memory or disk, with what this process and others need beside it; None: there is room."""
        if num_bytes <= SMALL_BYTES:
            return None
        size, memory = f"payload of {num_bytes / 1e6:.0f} MB", self._memory()
        disk = shutil.disk_usage(self._store.folder).free
        if memory is not None and COPIES * num_bytes > memory:
            return f"{size}; this device's agent may take {memory / 1e6:.0f} MB of memory"
        if COPIES * num_bytes > disk:
            return f"{size}; this device has {disk / 1e6:.0f} MB of disk left"
        return None

    def _have(self, offer: Offer) -> bool:
        errand = offer.errand
        if errand.kind == "enrolment":
            stored = self._store.enrolment(errand.run).read()
            return stored is not None and digest_of(stored) == offer.digest
        if errand.kind == "bundle":
            return self._store.adopt_bundle(errand.run, offer.digest)
        return self._store.task(errand.run, offer.transfer).read() is not None

    def _objects(self, errand: Errand) -> str | None:
        if errand.kind == "update":
            return "an update goes up, not down"
        if errand.kind == "bundle" and self._store.enrolment(errand.run).read() is None:
            return f"this device knows no run {errand.run!r}"
        if errand.kind == "task" and not self._is_in(errand.run):
            return f"this device is not enrolled in run {errand.run!r}"
        return self._objection() if errand.kind == "task" else None
