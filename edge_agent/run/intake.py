"""The inbox of a device: it accepts or refuses offers, stores payloads, and times downloads."""

import logging
import shutil
from collections.abc import Callable
from contextlib import suppress

from fleetune.edge_agent.extensions.adoption.deployed_model import read_deployed
from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.edge_agent.state.deployed_files import DeployedFiles
from fleetune.protocols.errors import PacketError, StoreError
from fleetune.protocols.wire.inbox import Arrived, Inbox
from fleetune.protocols.wire.incoming_parts import part_folder
from fleetune.protocols.wire.messages import Offer, Refuse, TransferKey, readable
from fleetune.protocols.wire.transfer import Chunk, Receipt, digest_of

log = logging.getLogger(__name__)

MAX_PAYLOAD_BYTES = 2**31
SMALL_BYTES = 2**20  # a payload of this size is always accepted
AGAIN_S = 60.0
# lower bound: a payload is in memory packed and unpacked, and on disk as a part and as the stored file
COPIES = 2


class Intake(Inbox):
    """Receives enrolments, bundles, backbones and tasks. It refuses payloads when memory or disk is full.

    Args:
        device: name of the device.
        store: stores the payloads.
        joined: returns the run that this device takes part in, or None.
        reason_not_to_train: returns why the device would not train at present, or None if it would.
        clock: monotonic clock, in seconds.
        memory: bytes that this process may use; None if not known.

    Attributes:
        again_at: time at which to ask again for payloads that did not fit.
    """

    def __init__(
        self,
        device: str,
        store: AgentStore,
        *,
        joined: Callable[[], str | None],
        reason_not_to_train: Callable[[], str | None],
        clock: Callable[[], float],
        memory: Callable[[], int | None] = lambda: None,
    ) -> None:
        super().__init__(
            device,
            part_folder(store.incoming),
            max_bytes=MAX_PAYLOAD_BYTES,
            have=self._holds,
            objects=self._why_unwanted,
        )
        self._store, self._joined, self._reason_not_to_train = store, joined, reason_not_to_train
        self._clock, self._memory = clock, memory
        self._transfer, self._offered_at = "", 0.0
        # the last completed transfer and the time when it ended
        self._arrived: tuple[str, float] | None = None
        self.again_at: float | None = None

    def handle_offer(self, offer: Offer) -> Receipt | Arrived | None:
        """Answer an offer. Its payload may be stored already, from before a restart of either side.

        While this device has joined no run, it does not answer the offer of a task. It has just started, and
        the enrolment comes first.
        """
        if offer.transfer_key.kind == "task" and self._joined() is None:
            return None
        if offer.transfer_key.kind == "backbone" and not self._is_wanted(offer):
            return Refuse(offer.transfer, f"no backbone {offer.digest} was asked for")
        if (problem := self._has_no_room(offer.num_bytes)) is not None:
            self.again_at = self._clock() + AGAIN_S
            return Refuse(offer.transfer, problem)
        if offer.transfer != self._transfer:
            self._transfer, self._offered_at = offer.transfer, self._clock()
        try:
            if self.is_settled(offer.transfer) and self._is_gone(offer):
                self.forget(offer.transfer)
            return super().handle_offer(offer)
        except StoreError as fault:
            return self._put_off(offer.transfer, fault)

    def handle_chunk(self, packet: bytes, now: float) -> Receipt | Arrived | None:
        """Handle a chunk; refuse its transfer if the disk is full. Raises PacketError."""
        try:
            return super().handle_chunk(packet, now)
        except StoreError as fault:
            return self._put_off(Chunk.decode(packet).transfer, fault)

    def keep(self, arrived: Arrived) -> Refuse | None:
        """Store a payload; return None if it can be accepted, else the refusal to send."""
        self._arrived = arrived.offer.transfer, self._clock()
        try:
            self._store_it(arrived.offer, arrived.payload())
        except StoreError as fault:
            return self._put_off(arrived.offer.transfer, fault)
        return None

    def _store_it(self, offer: Offer, payload: bytes) -> None:
        key = offer.transfer_key
        if key.kind == "enrolment":
            self._store.enrolment(key.run).write(payload)
        elif key.kind == "bundle":
            self._store.keep_bundle(key.run, payload)
        elif key.kind == "backbone":
            self._store.keep_backbone(payload, self._runs_deployed())
        else:
            self._store.keep_task(key.run, offer.transfer, payload)

    def _runs_deployed(self) -> set[str]:
        """Return runs whose models the device deploys or could roll back to, if their files can be read."""
        files, runs = DeployedFiles.next_to(self._store.deployed), set()
        for file in (self._store.deployed, *map(files.version, files.numbers)):
            with suppress(PacketError, StoreError):
                deployed = read_deployed(file.read())
                runs |= set() if deployed is None else {deployed.record.run}
        return runs

    def _put_off(self, transfer: str, fault: StoreError) -> Refuse:
        """Remove the parts of a payload that cannot be stored, and refuse it.

        The next offer is tried again.
        """
        log.error("%s", fault)
        with suppress(StoreError):
            self.give_up(transfer)
        self.again_at = self._clock() + AGAIN_S
        return Refuse(transfer, readable(str(fault)))

    def download_s(self, transfer: str) -> float | None:
        """Return the seconds from a transfer's offer to its last byte; None if an earlier process received
        it.
        """
        if self._arrived is None or not self._arrived[0] == self._transfer == transfer:
            return None
        return self._arrived[1] - self._offered_at

    def _has_no_room(self, num_bytes: int) -> str | None:
        """Return why memory or disk has no space for a payload; None if there is space."""
        if num_bytes <= SMALL_BYTES:
            return None
        size, memory = f"payload of {num_bytes / 1e6:.0f} MB", self._memory()
        disk = shutil.disk_usage(self._store.folder).free
        if memory is not None and COPIES * num_bytes > memory:
            return f"{size}; this device's agent may take {memory / 1e6:.0f} MB of memory"
        if COPIES * num_bytes > disk:
            return f"{size}; this device has {disk / 1e6:.0f} MB of disk left"
        return None

    def _holds(self, offer: Offer) -> bool:
        key = offer.transfer_key
        if key.kind == "enrolment":
            stored = self._store.enrolment(key.run).read()
            return stored is not None and digest_of(stored) == offer.digest
        if key.kind == "bundle":
            return self._store.adopt_bundle(key.run, offer.digest)
        if key.kind == "backbone":
            return self._store.backbone(offer.digest) is not None
        return self._store.task(key.run, offer.transfer).read() is not None

    def _is_wanted(self, offer: Offer) -> bool:
        """True if the offer is the backbone that its run's enrolment names."""
        return self._store.wanted_backbone(offer.transfer_key.run) == offer.digest

    def _is_gone(self, offer: Offer) -> bool:
        """True if a stored payload is missing from the disk; a task that a newer task replaced does not
        count.
        """
        if offer.transfer_key.kind == "task":
            return not self._store.has_task(offer.transfer_key.run)
        return not self._holds(offer)

    def _why_unwanted(self, key: TransferKey) -> str | None:
        if key.kind == "update":
            return "an update goes up, not down"
        if key.kind == "bundle" and self._store.enrolment(key.run).read() is None:
            return f"this device knows no run {key.run!r}"
        if key.kind == "task" and self._joined() != key.run:
            return f"this device is not enrolled in run {key.run!r}"
        return self._reason_not_to_train() if key.kind == "task" else None
