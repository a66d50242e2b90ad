"""What comes down to this device, from the offer to the disk: wanted or not, stored, and timed."""

import logging
import shutil
from collections.abc import Callable
from contextlib import suppress

from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.protocols.errors import StoreError
from fleetune.protocols.wire.incoming_parts import part_folder
from fleetune.protocols.wire.mailbox import Arrived, Inbox
from fleetune.protocols.wire.messages import Offer, Refuse, TransferKey, readable
from fleetune.protocols.wire.transfer import Chunk, Reply, digest_of

log = logging.getLogger(__name__)

MAX_PAYLOAD_BYTES = 2**31
SMALL_BYTES = 2**20  # there is always room for so much
AGAIN_S = 60.0
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
        self.again_at: float | None = None  # when to ask again for what there was no room for
        self._arrived: tuple[str, float] | None = None  # the last transfer that came in whole, and when

    def offer(self, offer: Offer) -> list[Reply | Arrived]:
        """Answer an offer; what it brings may be here already, from before a restart of either side."""
        if (problem := self._has_no_room(offer.num_bytes)) is not None:
            self.again_at = self._clock() + AGAIN_S
            return [Refuse(offer.transfer, problem)]
        if offer.transfer != self._transfer:
            self._transfer, self._offered_at = offer.transfer, self._clock()
        try:
            if self._inbox.is_settled(offer.transfer) and self._is_gone(offer):
                self._inbox.forget(offer.transfer)
            return self._inbox.handle_offer(offer)
        except StoreError as fault:
            return [self._refuse(offer.transfer, fault)]

    def chunk(self, data: bytes) -> list[Reply | Arrived]:
        """Raises PacketError."""
        try:
            return self._inbox.handle_chunk(data, self._clock())
        except StoreError as fault:
            return [self._refuse(Chunk.decode(data).transfer, fault)]

    def keep(self, arrived: Arrived) -> Refuse | None:
        """Put it on disk; or, where that cannot be, what to answer instead."""
        self._arrived = arrived.offer.transfer, self._clock()
        try:
            self._store_it(arrived.offer, arrived.payload())
        except StoreError as fault:
            return self._refuse(arrived.offer.transfer, fault)
        self._inbox.settle(arrived.offer.transfer)
        return None

    def _store_it(self, offer: Offer, payload: bytes) -> None:
        if offer.transfer_key.kind == "enrolment":
            self._store.enrolment(offer.transfer_key.run).write(payload)
        elif offer.transfer_key.kind == "bundle":
            self._store.keep_bundle(offer.transfer_key.run, payload)
        else:
            self._store.keep_task(offer.transfer_key.run, offer.transfer, payload)

    def _refuse(self, transfer: str, fault: StoreError) -> Refuse:
        """What cannot be stored: nobody shall wait for us, and what is there of it makes room. Offered again
        it is tried again.
        """
        log.error("%s", fault)
        with suppress(StoreError):
            self._inbox.give_up(transfer)
        self.again_at = self._clock() + AGAIN_S
        return Refuse(transfer, readable(str(fault)))

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
        transfer_key = offer.transfer_key
        if transfer_key.kind == "enrolment":
            stored = self._store.enrolment(transfer_key.run).read()
            return stored is not None and digest_of(stored) == offer.digest
        if transfer_key.kind == "bundle":
            return self._store.adopt_bundle(transfer_key.run, offer.digest)
        return self._store.task(transfer_key.run, offer.transfer).read() is not None

    def _is_gone(self, offer: Offer) -> bool:
        """From the disk, after it was taken; an older task is not, if a newer one has taken its place."""
        if offer.transfer_key.kind == "task":
            return not self._store.has_task(offer.transfer_key.run)
        return not self._have(offer)

    def _objects(self, transfer_key: TransferKey) -> str | None:
        if transfer_key.kind == "update":
            return "an update goes up, not down"
        if transfer_key.kind == "bundle" and self._store.enrolment(transfer_key.run).read() is None:
            return f"this device knows no run {transfer_key.run!r}"
        if transfer_key.kind == "task" and not self._is_in(transfer_key.run):
            return f"this device is not enrolled in run {transfer_key.run!r}"
        return self._objection() if transfer_key.kind == "task" else None
