"""A fleet has one coordinator: whoever would be a second one hears of the first, and leaves.

Each says on a topic of theirs that it is there: when it connects, and to whoever says so and has to leave.
Both know by the same rule which of two has to: who only asks before who serves, the younger before the
older. Nothing is retained, so a dead one is in nobody's way. One that was cut off settles it when it is back.
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

SILENCE_S = 0.5  # from when we hear ourselves; an answer that comes later still ends the younger
PATIENCE_S = 3.0
REPEAT_S = 0.25

MakeTransport = Callable[[EventSink], Transport]


class CoordinatorPresence(Message, frozen=True, tag="Here"):
    """Coordinator to coordinators: I am there.

    Attributes:
        nonce: new at every start.
        run: name of its run.
        host, pid: where it is.
        since: seconds of the epoch.
        serves: it does not only ask.
    """

    nonce: Nonce
    run: FleetName
    host: Label
    pid: Number
    since: Annotated[float, Meta(ge=0, le=2**35)]
    serves: bool

    def has_priority_over(self, other: "CoordinatorPresence") -> bool:
        """Whether the other has to leave."""
        return (not self.serves, self.since, self.nonce) < (not other.serves, other.since, other.nonce)


@dataclass
class ConflictDetector:
    """Looks out for another coordinator of a fleet until it is closed.

    It has a connection of its own, whose thread does the work: so it also answers while the coordinator is
    busy, or only starting.

    Attributes:
        fleet: its name.
        run: name of our run.
        since: when we started, seconds of the epoch.
        silence_s: without an answer for so long there is no other.
        timer: seconds that never jump.
    """

    fleet: str
    run: str
    since: float = field(default_factory=time.time)
    silence_s: float = SILENCE_S
    timer: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._nonce = uuid.uuid4().hex[:12]
        self.client_id = f"coordinator-{self.fleet}-{self._nonce}"
        self._transport: Transport | None = None
        self._serves, self._heard_ourselves_at = False, float("inf")
        self._out_of_reach = False
        self._rival: CoordinatorPresence | None = None
        self._tell: Callable[[], None] = lambda: None
        self._news = threading.Event()

    def ask(self, make_transport: MakeTransport) -> None:
        """Ask who is there; `wait` has the answer."""
        self._transport = make_transport(self)
        self._transport.connect()

    def take(self, make_transport: MakeTransport) -> None:
        """Serve the fleet without asking first: the broker is ours, and new."""
        self._serves = True
        self.ask(make_transport)

    def wait(self) -> None:
        """Until it is known whether there is another, or the broker is out of reach.

        Raises:
            SettingError: there is.
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
        """Call `tell`, in whatever thread, when another is found that we have to make room for."""
        self._tell = tell
        if self._rival:
            tell()

    def check(self) -> None:
        """Raises SettingError when another was found that we have to make room for."""
        if self._rival is None:
            return
        other, since = self._rival, time.strftime("%Y-%m-%d %H:%M", time.localtime(self._rival.since))
        raise SettingError(
            f"fleet {self.fleet} already has a coordinator: run {other.run} (since {since}) at "
            f"{readable(other.host)}, process {other.pid}; stop it, or give --fleet another name"
        )

    def close(self) -> None:
        """Look out no longer; harmless when it does not."""
        if self._transport:
            self._transport.close()
            self._transport = None

    def put(self, event: Any) -> None:
        """What the transport hears."""
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
            log.debug("no coordinator's word: %r", data[:100])
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
