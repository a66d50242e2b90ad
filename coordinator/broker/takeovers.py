"""Disconnects clients by connecting with their client ids, and repeats this until they are surely gone."""

import logging
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass

from paho.mqtt.client import Client
from paho.mqtt.enums import CallbackAPIVersion

from fleetune.protocols.wire.transport.mqtt import Broker

log = logging.getLogger(__name__)

CONNECT_S = 2.0
# mosquitto closes a connection that has not named itself for 95 s. Until then, a device whose certificate was
# checked before its revocation may still be accepted.
REPEAT_FOR_S = 120.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 10.0
SAY_AFTER_S = 10.0


def take_over(broker: Broker, client_id: str) -> bool:
    """Disconnect a client by a short connection with its client id; True if the broker has done so.

    The broker ends the old connection, and removes what it stored for it, before it accepts the new one.
    """
    client = Client(CallbackAPIVersion.VERSION2, client_id=client_id, clean_session=True)
    client.username_pw_set(broker.username, broker.password)
    with suppress(OSError):  # no broker listens
        client.connect(broker.host, broker.port)
        give_up_at = time.monotonic() + CONNECT_S
        while not client.is_connected() and time.monotonic() < give_up_at and not client.loop(0.1):
            pass
        done = client.is_connected()
        client.disconnect()
        if (left := client.socket()) is not None:
            left.close()
        return done
    return False


@dataclass
class _Unwanted:
    since: float
    next_at: float
    pause_s: float = FIRST_PAUSE_S
    gone: bool = False


class Takeovers:
    """The clients that must not stay connected.

    Args:
        take_over: disconnects a client id; True if the broker has done so.
        clock: seconds of a monotonic clock.
    """

    def __init__(self, take_over: Callable[[str], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._take_over = take_over
        self._clock = clock
        self._unwanted: dict[str, _Unwanted] = {}
        self._said = False

    def add(self, client_ids: Iterable[str]) -> None:
        """Disconnect these clients at the next `work`, and then repeatedly for two minutes."""
        now = self._clock()
        for client_id in client_ids:
            gone = client_id in self._unwanted and self._unwanted[client_id].gone
            self._unwanted[client_id] = _Unwanted(now, now, gone=gone)

    def drop(self, client_ids: Collection[str]) -> None:
        """Let these clients connect again."""
        for client_id in client_ids:
            self._unwanted.pop(client_id, None)

    def work(self) -> None:
        """Disconnect the clients that are due. After a failure, the others wait for the next call."""
        for client_id, one in list(self._unwanted.items()):
            now = self._clock()
            if now < one.next_at:
                continue
            if not self._take_over(client_id):
                self._say(client_id, now - one.since)
                return
            one.gone = True
            one.next_at, one.pause_s = now + one.pause_s, min(2 * one.pause_s, LONGEST_PAUSE_S)
            if now - one.since > REPEAT_FOR_S:
                del self._unwanted[client_id]
        self._said = False

    def is_gone(self, client_id: str) -> bool:
        """True if the client has been disconnected since it was added."""
        return client_id not in self._unwanted or self._unwanted[client_id].gone

    def _say(self, client_id: str, late_s: float) -> None:
        if late_s > SAY_AFTER_S and not self._said:
            self._said = True
            log.warning(
                "%s may no longer connect, but the broker has not disconnected it yet; trying again",
                client_id,
            )
