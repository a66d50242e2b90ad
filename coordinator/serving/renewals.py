"""Renews the certificates of devices over their connections: asks, has the requests signed, and answers."""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import fleetune.protocols.wire.messages as wire
from fleetune.coordinator.broker.known_devices import KnownDevices
from fleetune.coordinator.rate_limiter import TokenBuckets
from fleetune.coordinator.serving.device_sessions import DeviceSession, DeviceSessions
from fleetune.coordinator.serving.rejected_messages import RejectedMessages
from fleetune.coordinator.serving.transfers import Transfers
from fleetune.protocols.errors import FleetuneError, PacketError, PacketForeign
from fleetune.protocols.wire.peer_link import Packet

LOOK_EVERY_S = 10.0
ASK_EVERY_S = 3600.0  # for one device
REQUESTS, REQUESTS_PER_S = 3, 1 / 60  # of one device
MOST_WAITING, MOST_AT_ONCE = 1000, 100

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RenewalsSigned:
    """Event: a child process has answered requests; `answers` is None if it failed."""

    answers: Mapping[str, wire.Renewed | PacketError] | None
    problem: str = ""


@dataclass
class Renewals:
    """Asks devices whose certificates are due, and answers their requests.

    A request that is dropped here is sent again by its device.

    Attributes:
        devices: the devices of the broker.
        sessions: the sessions of all devices.
        transfers: publishes messages to devices.
        rejected: logs rejected requests, within limits.
        put: puts `RenewalsSigned` into the server's queue, from another thread.
    """

    devices: KnownDevices
    sessions: DeviceSessions
    transfers: Transfers
    rejected: RejectedMessages
    put: Callable[[Any], None]
    _look_at: float = float("-inf")
    _is_signing: bool = False
    _waiting: dict[str, str] = field(default_factory=dict)
    _asked: TokenBuckets = field(default_factory=lambda: TokenBuckets(1, 1 / ASK_EVERY_S, MOST_WAITING * 50))
    _requests: TokenBuckets = field(default_factory=lambda: TokenBuckets(REQUESTS, REQUESTS_PER_S))

    def look(self, now: float) -> None:
        """Ask the connected devices whose certificates are due, once an hour each."""
        if now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_S
        for session in self.sessions.values():
            if (
                session.online
                and self.devices.is_renewal_due(session.device)
                and "renewal" in session.reads.features.messages
                and self._asked.of(session.device).take(now)
            ):
                self.transfers.publish(session, Packet("down", wire.RenewalDue()))

    def take(self, session: DeviceSession, request: wire.Renew, now: float) -> None:
        """Have a request signed. Raises PacketForeign if the broker knows the device by no certificate."""
        if session.identity.known_by != "certificate":
            raise PacketForeign("a Renew of a device that has no certificate of this fleet")
        is_full = len(self._waiting) >= MOST_WAITING and session.device not in self._waiting
        if is_full or not self._requests.of(session.device).take(now):
            return
        self._waiting[session.device] = request.signing_request
        self._sign()

    def note_signed(self, event: RenewalsSigned) -> None:
        """Send the answers to the devices."""
        self._is_signing = False
        if event.answers is None:
            log.warning("certificates are not renewed yet: %s; the devices ask again", event.problem)
        for device, answer in (event.answers or {}).items():
            session = self.sessions.get(device)
            if isinstance(answer, PacketError):
                self.rejected.note(answer, device)
            elif session is not None:
                self.transfers.publish(session, Packet("down", answer))
                log.info("%s has a new certificate", session.identity)
        self._sign()

    def _sign(self) -> None:
        if self._is_signing or not self._waiting:
            return
        batch = {device: self._waiting[device] for device in islice(self._waiting, MOST_AT_ONCE)}
        for device in batch:
            del self._waiting[device]
        self._is_signing = True
        threading.Thread(target=self._have_signed, args=(batch,), name="renewals", daemon=True).start()

    def _have_signed(self, batch: Mapping[str, str]) -> None:
        try:
            self.put(RenewalsSigned(self.devices.renew(batch)))
        except FleetuneError as problem:
            self.put(RenewalsSigned(None, str(problem)))
