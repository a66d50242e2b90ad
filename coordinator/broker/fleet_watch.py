"""Follows a fleet's registry, so that other processes' changes take effect at once."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from fleetune.coordinator.broker.fleet_listeners import FleetListeners
from fleetune.coordinator.broker.known_devices import BrokerRefused, DevicesChanged, KnownDevices
from fleetune.coordinator.broker.restarted_child import RestartedChild
from fleetune.coordinator.broker.takeovers import Takeovers, take_over
from fleetune.coordinator.fleet.authority import Authority
from fleetune.coordinator.fleet.fleet_folder import FleetFolder
from fleetune.coordinator.fleet.registry import RegisteredDevice, Registry
from fleetune.coordinator.fleet.renewal import is_renewal_due, renew
from fleetune.coordinator.fleet.rotation import listed
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
NOTE_SEEN_EVERY_S = 10.0


@dataclass(frozen=True)
class _Fleet:
    """Registry and authority of a fleet at one moment.

    Attributes:
        devices: all registered devices, by id.
        shut_out: why devices may not connect, by id.
        authorities: fingerprints of the trusted authorities; the first one signs.
        bundle: `Authority.bundle_id`.
    """

    devices: Mapping[str, RegisteredDevice] = field(default_factory=dict)
    shut_out: Mapping[str, str] = field(default_factory=dict)
    authorities: tuple[str, ...] = ()
    bundle: str = ""

    @classmethod
    def read(cls, files: FleetFolder, registry: Registry, before: Iterable[str]) -> Self:
        """Read both; devices of `before` that are not registered any more count as forgotten."""
        with registry.step():  # a rotation changes both in one step
            devices = {one.id: one for one in registry.devices()}
            authority = Authority(files)
            authorities, bundle = tuple(authority.fingerprints), authority.bundle_id
        now = time.time()
        shut_out = {one.id: why for one in devices.values() if (why := one.shut_out(now))}
        shut_out |= {device: "forgotten" for device in before if device not in devices}
        return cls(devices, shut_out, authorities, bundle)

    @property
    def allowed(self) -> set[str]:
        return self.devices.keys() - self.shut_out.keys()


@dataclass
class FleetWatch(KnownDevices):
    """Applies changes of the registry to the broker, and reports them to the coordinator.

    A revoked device is disconnected by a client that takes over its client id. The broker has read the new
    revocation list before, so the device cannot come back. `Takeovers` repeats this for connections that were
    being opened meanwhile. If an authority is no longer trusted, the broker starts anew.

    Attributes:
        listeners: the listeners of the fleet's devices.
        broker: the fleet's broker.
    """

    listeners: FleetListeners = field(kw_only=True)
    broker: RestartedChild[Any] = field(kw_only=True)

    def __post_init__(self) -> None:
        self._fleet = _Fleet()
        self._seen: dict[str, tuple[float, str, str]] = {}
        self._takeovers = Takeovers(lambda client_id: take_over(self.connection, client_id))
        self._leaving: dict[str, RegisteredDevice] = {}  # still to be disconnected
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
        found = self._fleet.devices.get(device)
        if found is None:
            return Identity(device, name or device)
        return Identity(device, found.name if found.renamed or not name else name, found.kind)

    def note_seen(self, device: str, name: str, agent: str) -> None:
        self._seen[device] = time.time(), agent, name

    def is_renewal_due(self, device: str) -> bool:
        found = self._fleet.devices.get(device)
        authorities, bundle = self._fleet.authorities, self._fleet.bundle
        return found is not None and is_renewal_due(found, authorities[0], bundle, time.time())

    def renew(self, requests: Mapping[str, str]) -> dict[str, Renewed | PacketError]:
        """Return the answers to signing requests, by a child process that imports `cryptography`."""
        return in_child_process("new certificates", renew, self.listeners.files, requests, time.time())

    def report_to(self, put: Callable[[Any], None]) -> None:
        self._put = put
        put(DevicesChanged(self._fleet.shut_out))  # some may have been revoked while no coordinator ran

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
        changed = now != self._known
        if changed:
            self._apply(registry, first=self._known is None)
        connected, allowed = self.listeners.news.take_accepted(), self._fleet.allowed
        self._takeovers.add({one for one in connected if one.partition("~")[0] not in allowed})
        self._note_connected(connected)
        self._disconnect()
        if changed:
            self._known, self._version = now, version
        refused = self.listeners.news.take_refused()
        if refused and self._put is not None:
            self._put(BrokerRefused(refused))

    def _apply(self, registry: Registry, *, first: bool) -> None:
        before, now = self._fleet, _Fleet.read(self.listeners.files, registry, self._fleet.devices)
        drops = not set(before.authorities) <= set(now.authorities)
        if drops:  # mosquitto checks new connections only, and whoever had the old key may use any name
            self.broker.child.end()
        elif not first:
            self.broker.child.reload()
        self._fleet = now
        gone = [before.devices[device] for device in sorted(before.allowed - now.allowed)]
        if not first and before.authorities != now.authorities:
            self._say_rotation(gone, drops=drops)
        self._takeovers.drop([one for device in now.allowed - before.allowed for one in _client_ids(device)])
        if not drops:
            self._shut_out(gone)
        if before.devices != now.devices and self._put is not None:
            self._put(DevicesChanged(now.shut_out))

    def _shut_out(self, gone: Iterable[RegisteredDevice]) -> None:
        for one in gone:
            self._takeovers.add(_client_ids(one.id))
            self._leaving[one.id] = one

    def _say_rotation(self, gone: list[RegisteredDevice], *, drops: bool) -> None:
        fleet = self.listeners.files.fleet
        if not drops:
            log.warning("fleet %s has a new authority; devices get it while they are connected", fleet)
        elif not gone:
            log.warning("fleet %s: the old authority is dropped, because all devices have the new one", fleet)
        else:
            line = "fleet %s trusts only its new authority: the broker restarts, and %s must join again"
            log.warning(line, fleet, listed(gone))

    def _disconnect(self) -> None:
        for client_id in self.listeners.news.take_flooding():
            take_over(self.connection, client_id)
        self._takeovers.work()
        for device in self._fleet.allowed & self._leaving.keys():
            del self._leaving[device]
        for device, known in list(self._leaving.items()):
            if all(self._takeovers.is_gone(one) for one in _client_ids(device)):
                log.warning("%s may no longer connect; the broker has disconnected it", known)
                del self._leaving[device]

    def _note_connected(self, client_ids: Iterable[str]) -> None:
        """Note devices that connected, also those that send no presence message as an agent does."""
        for client_id in client_ids:
            if found := self._fleet.devices.get(client_id.partition("~")[0]):
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


def _client_ids(device: str) -> tuple[str, str]:
    """Return the client ids of a device's connections."""
    return device, f"{device}~{PROBE}"
