"""Detects a second coordinator of the same fleet, and decides which of the two leaves.

Each coordinator announces itself on a topic of its fleet: when it connects, and when another coordinator that
has to leave announces itself. Both apply the same rule. A coordinator that is starting leaves before one that
already serves devices; of equals, the younger leaves. The broker retains no announcement, so a dead
coordinator blocks no other. A coordinator that lost its connection applies the rule again when it reconnects.
"""

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from fleetune.protocols.bounds import FleetName, Label, Nonce, Number
from fleetune.protocols.errors import SettingError
from fleetune.protocols.wire import topics
from fleetune.protocols.wire.messages import MAX_CONTROL_BYTES, Message, encode, readable
from fleetune.protocols.wire.transport import Connected, Disconnected, EventSink, Received, Transport

log = logging.getLogger(__name__)

SILENCE_S = 0.5  # from the echo of our own announcement; a later answer still makes the younger one leave
PATIENCE_S = 3.0
REPEAT_S = 0.25

MakeTransport = Callable[[EventSink], Transport]


class CoordinatorPresence(Message, frozen=True, tag="Here"):
    """The message with which a coordinator announces itself to other coordinators of the fleet.

    Attributes:
        nonce: a random id that is new at every start.
        run: the name of its run.
        host, pid: the coordinator's machine and process id.
        since: the time of its start, in seconds of the epoch.
        serves: True if it already serves devices; False while it is starting.
    """

    nonce: Nonce
    run: FleetName
    host: Label
    pid: Number
    since: Annotated[float, Meta(ge=0, le=2**35)]
    serves: bool

    def has_priority_over(self, other: "CoordinatorPresence") -> bool:
        """True if the other coordinator has to leave."""
        return (not self.serves, self.since, self.nonce) < (not other.serves, other.since, other.nonce)


@dataclass
class ConflictDetector:
    """Watches for another coordinator of a fleet until `close`.

    The detector has its own connection and works in that connection's thread. So it also answers while the
    coordinator is busy or still starting.

    Attributes:
        fleet: the name of the fleet.
        run: the name of this coordinator's run.
        since: the start of this coordinator, in seconds since 1970.
        silence_s: the time without an answer after which the fleet is taken to have no other coordinator.
        timer: a monotonic clock, in seconds.
    """

    fleet: str
    run: str
    since: float = field(default_factory=time.time)
    silence_s: float = SILENCE_S
    timer: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._nonce = uuid.uuid4().hex[:12]
        self.client_id = topics.coordinator_id(self.fleet, self._nonce)
        self._transport: Transport | None = None
        self._serves, self._heard_ourselves_at = False, float("inf")
        self._out_of_reach = False
        self._rival: CoordinatorPresence | None = None
        self._tell: Callable[[], None] = lambda: None
        self._news = threading.Event()

    def ask(self, make_transport: MakeTransport) -> None:
        """Ask for other coordinators of the fleet; `wait` then waits for the answer."""
        self._transport = make_transport(self)
        self._transport.connect()

    def take(self, make_transport: MakeTransport) -> None:
        """Serve the fleet without asking, because this process has just started the broker."""
        self._serves = True
        self.ask(make_transport)

    def wait(self) -> None:
        """Wait until it is known whether the fleet has another coordinator, or the broker cannot be reached.

        Raises:
            SettingError: the fleet has another coordinator.
        """
        give_up_at = self.timer() + PATIENCE_S
        while self._transport and not (self._serving or self._rival or self._out_of_reach):
            if self.timer() >= give_up_at:
                break
            self._news.wait(min(REPEAT_S, self.silence_s))
            self._news.clear()
            if self._heard_ourselves_at == float("inf"):
                self._say()  # the broker may not have subscribed us yet
        self.check()

    def on_rival(self, tell: Callable[[], None]) -> None:
        """Call `tell`, possibly in another thread, when a coordinator is found that has priority."""
        self._tell = tell
        if self._rival:
            tell()

    def check(self) -> None:
        """Raise SettingError if a coordinator with priority over this one was found."""
        if self._rival is None:
            return
        other, since = self._rival, time.strftime("%Y-%m-%d %H:%M", time.localtime(self._rival.since))
        raise SettingError(
            f"fleet {self.fleet} already has a coordinator: run {other.run} (since {since}) at "
            f"{readable(other.host)}, process {other.pid}; stop it, or give --fleet another name"
        )

    def close(self) -> None:
        """Stop watching. Calling it twice is harmless."""
        if self._transport:
            self._transport.close()
            self._transport = None

    def put(self, event: Any) -> None:
        """Handle an event of the connection to the broker."""
        match event:
            case Connected():
                self._out_of_reach = False
                self._say()
            case Disconnected():
                self._out_of_reach = True
            case Received(_, data, retained=False):
                self._hear(data)
        self._news.set()

    def _hear(self, data: bytes) -> None:
        if len(data) > MAX_CONTROL_BYTES or self._rival:
            return
        try:
            other = msgspec.json.decode(data, type=CoordinatorPresence)
        except (msgspec.DecodeError, ValueError, RecursionError):
            log.debug("ignored a message on the coordinators' topic that cannot be read: %r", data[:100])
            return
        if other.nonce == self._nonce:
            self._heard_ourselves_at = min(self._heard_ourselves_at, self.timer())
        elif other.has_priority_over(self._here):
            self._rival = other
            self._tell()
        else:
            self._say()

    @property
    def _serving(self) -> bool:
        return self._serves or self.timer() >= self._heard_ourselves_at + self.silence_s

    @property
    def _here(self) -> CoordinatorPresence:
        host = socket.gethostname()[:100]
        return CoordinatorPresence(self._nonce, self.run, host, os.getpid(), self.since, self._serving)

    def _say(self) -> None:
        if self._transport:
            self._transport.publish(topics.coordinators(self.fleet), encode(self._here))
