"""Follows a fleet's registry, so that other processes' changes take effect at once."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from paho.mqtt.client import Client
from paho.mqtt.enums import CallbackAPIVersion

from fleetune.coordinator.broker.fleet_listeners import FleetListeners
from fleetune.coordinator.broker.known_devices import BrokerRefused, DevicesChanged, KnownDevices
from fleetune.coordinator.broker.restarted_child import RestartedChild
from fleetune.coordinator.fleet.authority import Authority
from fleetune.coordinator.fleet.registry import RegisteredDevice, Registry
from fleetune.coordinator.fleet.renewal import is_renewal_due, renew
from fleetune.coordinator.run.child_process import in_child_process
from fleetune.protocols.errors import FleetuneError, PacketError
from fleetune.protocols.files import mark_of
from fleetune.protocols.one_line import flat
from fleetune.protocols.wire.identity import Identity
from fleetune.protocols.wire.messages import Renewed
from fleetune.protocols.wire.topics import COORDINATOR_USER, PROBE
from fleetune.protocols.wire.transport.mqtt import Broker

log = logging.getLogger(__name__)

CATCH_UP_S = 5.0
LOOK_EVERY_S = 0.5
KICK_S = 2.0
NOTE_SEEN_EVERY_S = 10.0


@dataclass
class FleetWatch(KnownDevices):
    """Applies changes of the registry to the broker, and reports them to the coordinator.

    A revoked device is disconnected by a client that takes over its client id. The broker has read the new
    revocation list before, so the device cannot come back. A connection that was being opened meanwhile is
    found in the broker's log.

    Attributes:
        listeners: the listeners of the fleet's devices.
        broker: the fleet's broker.
    """

    listeners: FleetListeners = field(kw_only=True)
    broker: RestartedChild[Any] = field(kw_only=True)

    def __post_init__(self) -> None:
        self._devices: dict[str, RegisteredDevice] = {}
        self._trusted = "", ""  # fingerprint of the authority that signs, and id of the bundle
        self._seen: dict[str, tuple[float, str, str]] = {}
        self._known: object = None
        self._version = 0
        self._put: Callable[[Any], None] | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="fleet", daemon=True)
        with Registry.open(self.listeners.files.registry) as registry:
            self._look(registry)
        self._thread.start()

    def identity(self, device: str, name: str) -> Identity:
        """Return the identity of a device; an operator's name for it wins over its own."""
        found = self._devices.get(device)
        if found is None:
            return Identity(device, name or device)
        return Identity(device, found.name if found.renamed or not name else name, found.kind)

    def note_seen(self, device: str, name: str, agent: str) -> None:
        self._seen[device] = time.time(), agent, name

    def is_renewal_due(self, device: str) -> bool:
        found = self._devices.get(device)
        return found is not None and is_renewal_due(found, *self._trusted, time.time())

    def renew(self, requests: Mapping[str, str]) -> dict[str, Renewed | PacketError]:
        """Return the answers to signing requests, by a child process that imports `cryptography`."""
        return in_child_process("new certificates", renew, self.listeners.files, requests, time.time())

    def report_to(self, put: Callable[[Any], None]) -> None:
        self._put = put

    def catch_up(self) -> None:
        give_up_at = time.monotonic() + CATCH_UP_S
        with Registry.open(self.listeners.files.registry) as registry:
            wanted = registry.version
        while self._version < wanted and time.monotonic() < give_up_at:
            time.sleep(LOOK_EVERY_S / 10)

    def close(self) -> None:
        """Stop following the registry."""
        self._closing.set()
        self._thread.join()

    def _follow(self) -> None:
        said, noted_at = "", time.monotonic()
        while not self._closing.wait(LOOK_EVERY_S):
            try:
                with Registry.open(self.listeners.files.registry) as registry:
                    while not self._closing.wait(LOOK_EVERY_S):
                        self._look(registry)
                        if time.monotonic() - noted_at > NOTE_SEEN_EVERY_S:
                            noted_at = time.monotonic()
                            self._note_seen(registry)
                    self._note_seen(registry)
            except (FleetuneError, OSError) as problem:
                if (line := flat(problem)) != said:
                    log.warning("fleet %s: %s; retrying", self.listeners.files.fleet, line)
                said = line

    def _look(self, registry: Registry) -> None:
        version = registry.version
        now = version, *(mark_of(file) for file in self.listeners.sources)
        if now != self._known:
            self._apply(registry, first=self._known is None)
            self._known, self._version = now, version
        connected = self.listeners.news.take_accepted()
        self._disconnect({one for one in connected if one.partition("~")[0] not in self._allowed})
        self._note_connected(connected)
        refused = self.listeners.news.take_refused()
        if refused and self._put is not None:
            self._put(BrokerRefused(refused))

    def _apply(self, registry: Registry, *, first: bool) -> None:
        if not first:
            self.broker.child.reload()
        before, allowed = self._devices, self._allowed
        self._devices = {one.id: one for one in registry.devices()}
        authority = Authority(self.listeners.files)
        self._trusted = authority.fingerprint, authority.bundle_id
        gone = allowed - self._allowed
        self._disconnect({client_id for one in gone for client_id in (one, f"{one}~{PROBE}")})
        for device in gone:
            log.warning("%s may no longer connect; the broker has disconnected it", before[device])
        if before != self._devices and self._put is not None:
            self._put(DevicesChanged(frozenset(gone)))

    @property
    def _allowed(self) -> set[str]:
        return {one.id for one in self._devices.values() if one.state == "accepted"}

    def _disconnect(self, client_ids: Iterable[str]) -> None:
        for client_id in client_ids:
            disconnect(self.connection, client_id)

    def _note_connected(self, client_ids: Iterable[str]) -> None:
        """Note devices that connected, also those that send no presence message as an agent does."""
        for client_id in client_ids:
            if found := self._devices.get(client_id.partition("~")[0]):
                self._seen.setdefault(found.id, (time.time(), found.agent, found.name))

    def _note_seen(self, registry: Registry) -> None:
        seen, self._seen = self._seen, {}
        if seen:
            registry.note_seen(seen)

    @property
    def connection(self) -> Broker:
        """The coordinator's own address and login."""
        child, password = self.broker.child, self.listeners.password
        return Broker(child.host, child.port, username=COORDINATOR_USER, password=password)


def disconnect(broker: Broker, client_id: str) -> None:
    """Disconnect a client by a short connection with its client id."""
    client = Client(CallbackAPIVersion.VERSION2, client_id=client_id)
    client.username_pw_set(broker.username, broker.password)
    with suppress(OSError):  # the broker is gone, and with it all connections
        client.connect(broker.host, broker.port)
        give_up_at = time.monotonic() + KICK_S
        while not client.is_connected() and time.monotonic() < give_up_at and not client.loop(0.1):
            pass
        client.disconnect()
