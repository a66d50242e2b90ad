"""Renews this device's certificates when the coordinator asks for it, over the connection that is there."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import fleetune.protocols.wire.messages as wire
from fleetune.edge_agent.joining.joined_fleet import Certificates, Credentials
from fleetune.edge_agent.joining.signing_request import KeyAndRequest, key_and_request
from fleetune.protocols.wire.peer_link import Packet

AGAIN_S = 600.0  # after which a request without an answer is sent again

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeyMade:
    """Event: a child process has made a new key, or failed."""

    made: Future[KeyAndRequest]


class Renewal:
    """The device's side of a renewal. The old key is used until the new one is on the disk.

    Args:
        credentials: the device's key and certificates; None if it has joined no fleet, so nothing is renewed.
        put: receives `KeyMade` from the thread that waits for the child process.

    Attributes:
        wake_at: time of the next call of `tick`; None for never.
    """

    def __init__(self, credentials: Credentials | None, put: Callable[[Any], None]) -> None:
        self._credentials, self._put = credentials, put
        self._is_making = False
        self.wake_at: float | None = None

    def start(self, now: float) -> Packet | None:
        """Make a key, because the coordinator asks for a renewal, or send the request again."""
        if self._credentials is None or self._is_making:
            return None
        if (again := self.resume(now)) is not None:
            return again
        self._is_making = True
        threading.Thread(target=self._make, name="key", daemon=True).start()
        return None

    def resume(self, now: float) -> Packet | None:
        """Send the request again whose answer is missing; return None if there is none. Raises StoreError."""
        pending = None if self._credentials is None else self._credentials.pending()
        return None if pending is None else self._ask(pending, now)

    def note_made(self, event: KeyMade, now: float) -> Packet | None:
        """Store a new key, and send its request. Raises StoreError."""
        self._is_making = False
        assert self._credentials is not None, "a key is made for a joined device only"
        made = event.made.result()
        self._credentials.keep_pending(made)
        return self._ask(made, now)

    def keep(self, renewed: wire.Renewed) -> None:
        """Store the new certificates; the next connection uses them. Raises StoreError."""
        pending = None if self._credentials is None else self._credentials.pending()
        if self._credentials is None or pending is None:
            return  # a second answer to the same request
        given = Certificates(renewed.certificate, renewed.probe_certificate, renewed.authority)
        self._credentials.keep(pending.key, given)
        self.wake_at = None
        log.info("certificate renewed; it is valid until %s", f"{self._credentials.valid_until():%Y-%m-%d}")

    def tick(self, now: float) -> Packet | None:
        """Send the request again if its answer is late. Raises StoreError."""
        if self.wake_at is None or now < self.wake_at:
            return None
        self.wake_at = None
        return self.resume(now)

    def _ask(self, pending: KeyAndRequest, now: float) -> Packet:
        self.wake_at = now + AGAIN_S
        return Packet("up", wire.Renew(pending.request))

    def _make(self) -> None:
        made: Future[KeyAndRequest] = Future()
        try:
            made.set_result(key_and_request())
        except Exception as problem:  # noqa: BLE001 - the agent's thread reports it
            made.set_exception(problem)
        self._put(KeyMade(made))
