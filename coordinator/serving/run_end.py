"""Telling the devices that a run is over."""

import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fleetune.protocols.errors import PacketError
from fleetune.protocols.wire import messages, topics
from fleetune.protocols.wire.messages import Finish, Left, Presence
from fleetune.protocols.wire.transport import Received, Transport


@dataclass
class RunEnd:
    """The last word to every device of a run.

    Attributes:
        transport: connected, or trying.
        fleet: its devices listen there.
        finish: what they are told.
        waiting: devices that have not said that they know.
    """

    transport: Transport
    fleet: str
    finish: Finish
    waiting: set[str]

    def say(self, events: "queue.SimpleQueue[Any]", until: float, timer: Callable[[], float]) -> None:
        """Tell all who wait, and those that come now; return when all know, at the latest at `until`."""
        for device in self.waiting:
            self._tell(device)
        while self.waiting and timer() < until:
            try:
                event = events.get(timeout=max(0.0, until - timer()))
            except queue.Empty:
                return
            if isinstance(event, Received):
                self._hear(event)

    def _tell(self, device: str) -> None:
        topic = topics.topic(self.fleet, device, "down")
        self.transport.publish(topic, messages.encode(self.finish))

    def _hear(self, event: Received) -> None:
        try:
            device = topics.parse(event.topic).device
            message = messages.read_from_device(event.data)
        except PacketError:
            return  # chunks and the like are no part of the run any more
        match message:
            case Left(run) if run == self.finish.run:
                self.waiting.discard(device)
            case Presence(online):
                if online:
                    self._tell(device)
                else:
                    self.waiting.discard(device)
            case _:
                return
