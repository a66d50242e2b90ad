"""Announces the end of a run to its devices."""

import queue
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from fleetune.protocols.errors import PacketError
from fleetune.protocols.wire import messages, topics
from fleetune.protocols.wire.messages import Finish, Left, Presence
from fleetune.protocols.wire.transport import Connected, Received, Transport


@dataclass
class FinishAnnouncement:
    """Sends the last message of a run to every device.

    Attributes:
        transport: the connection to the broker; it may still be connecting.
        fleet: the name of the fleet.
        finish: the message that ends the run.
        waiting: devices that may be connected and have not confirmed the message.
        absent: members of the run that are not connected.
    """

    transport: Transport
    fleet: str
    finish: Finish
    waiting: set[str]
    absent: Iterable[str] = ()

    def __post_init__(self) -> None:
        self._uncertain = {*self.waiting, *self.absent}  # all that have not confirmed, connected or not

    def say(self, events: "queue.SimpleQueue[Any]", until: float, timer: Callable[[], float]) -> None:
        """Send the last message to connected devices and to devices that connect meanwhile.

        This call returns when all devices have confirmed, at the latest at `until`. For other devices the
        broker stores the message.
        """
        self._tell_all()
        while self.waiting and timer() < until:
            try:
                event = events.get(timeout=max(0.0, until - timer()))
            except queue.Empty:
                break
            if isinstance(event, Connected):
                self._tell_all()  # the broker was out of reach before
            elif isinstance(event, Received):
                self._hear(event)
        for device in self._uncertain:
            self._tell(device, retain=True)

    def _tell_all(self) -> None:
        for device in self.waiting:
            self._tell(device)

    def _tell(self, device: str, *, retain: bool = False) -> None:
        topic = topics.topic(self.fleet, device, "down")
        self.transport.publish(topic, messages.encode(self.finish), retain=retain)

    def _hear(self, event: Received) -> None:
        try:
            device = topics.parse(event.topic).device
            message = messages.read_from_device(event.data)
        except PacketError:
            return  # chunks and the like no longer matter
        match message:
            case Left(run) if run == self.finish.run:
                self.waiting.discard(device)
                self._uncertain.discard(device)
            case Presence(True):
                self.waiting.add(device)
                self._uncertain.add(device)
                self._tell(device)
            case Presence(False):
                self.waiting.discard(device)
            case _:
                return
