"""Publishes packets for devices, and returns the events of their transfers."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from fleetune.coordinator.rate_limiter import TokenBuckets
from fleetune.coordinator.serving.device_sessions import DeviceSession, DeviceSessions
from fleetune.coordinator.serving.event_batch import EventBatch
from fleetune.coordinator.serving.event_queue import Timers
from fleetune.protocols.wire import topics
from fleetune.protocols.wire.inbox import Arrived
from fleetune.protocols.wire.messages import Message, encode
from fleetune.protocols.wire.outbox import Sent
from fleetune.protocols.wire.peer_link import Answered, Item, Packet
from fleetune.protocols.wire.transport import Transport

TransferEvent = Arrived | Sent | Answered


@dataclass(frozen=True)
class Transfers:
    """Publishes the packets of all device sessions, and sets their timers.

    Attributes:
        transport: the connection to the broker.
        fleet: name of the fleet, which is part of every topic.
        batch: delays each packet until the steps that caused it are committed.
        timers: the time of each session's next timer.
        sessions: the sessions of all devices.
        messages: the message budget of each device; each chunk sent to the device adds one message to it.
    """

    transport: Transport
    fleet: str
    batch: EventBatch
    timers: Timers
    sessions: DeviceSessions
    messages: TokenBuckets

    def carry(self, session: DeviceSession, items: Iterable[Item]) -> Iterator[TransferEvent]:
        """Publish the packets among a link's items, and yield the events between them.

        This is a generator, so that an event is handled before the packets that follow it are published.
        """
        for item in items:
            if isinstance(item, Packet):
                self.publish(session, item)
            elif isinstance(item, TransferEvent):
                yield item
        self.refresh(session)

    def publish(self, session: DeviceSession, packet: Packet) -> None:
        """Publish a packet once the steps of the open batch are committed."""
        topic = topics.topic(self.fleet, session.device, packet.channel)
        if packet.is_chunk:
            self.messages.of(session.device).give()  # the device acknowledges every chunk
        # Chunks wait for the commit too, because some follow their offer. They are encoded only then.
        self.batch.after_commit(lambda: self.transport.publish(topic, packet.data))

    def publish_on(self, device: str, channels: Iterable[topics.Channel], message: Message) -> None:
        """Publish one message on several channels of a device, after the open batch is committed."""
        for channel in channels:
            topic = topics.topic(self.fleet, device, channel)
            self.batch.after_commit(partial(self.transport.publish, topic, encode(message)))

    def clear_retained(self, device: str) -> None:
        """Delete the message that the broker retains for a device (see `FinishAnnouncement`)."""
        self.transport.publish(topics.topic(self.fleet, device, "down"), b"", retain=True)

    def clear_presence(self, device: str) -> None:
        """Delete the presence message that the broker retains of a device."""
        self.transport.publish(topics.topic(self.fleet, device, "state"), b"", retain=True)

    def refresh(self, session: DeviceSession) -> None:
        """Set the session's timer, and record whether the device is busy."""
        self.timers.set(session.device, session.link.wake_at)
        self.sessions.refresh(session)

    def forget(self, device: str) -> None:
        """Remove a device's session and its timer."""
        self.sessions.forget(device)
        self.timers.set(device, None)
