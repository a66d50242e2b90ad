"""A fleet with an authority and registered devices, made without its join server."""

import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fleetune.coordinator.broker.embedded_broker import EmbeddedBroker, claim_ports
from fleetune.coordinator.broker.fleet_listeners import NUM_PORTS, FleetListeners
from fleetune.coordinator.broker.open_fleet import make_certificates
from fleetune.coordinator.fleet.access_files import write_access_files
from fleetune.coordinator.fleet.authority import Authority, device_key
from fleetune.coordinator.fleet.fleet_folder import FleetFolder
from fleetune.coordinator.fleet.registry import RegisteredDevice, Registry
from fleetune.coordinator.fleet.secret_hash import hash_of
from fleetune.protocols.wire.transport.mqtt import Broker

needs_mosquitto = pytest.mark.skipif(
    shutil.which("mosquitto", path="/usr/sbin:/usr/bin:/usr/local/sbin") is None,
    reason="needs mosquitto: other brokers have no listeners for fleets",
)


@dataclass
class RegisteredFleet:
    """A fleet whose devices can connect at 127.0.0.1.

    Attributes:
        folder: the folder next to the runs.
        fleet: name of the fleet.
    """

    folder: Path
    fleet: str = "f"
    listeners: FleetListeners = field(init=False)

    def __post_init__(self):
        self.files = FleetFolder.of(self.fleet, self.folder)
        make_certificates(self.files, ["127.0.0.1"])
        self.authority = Authority.open(self.files, time.time())
        self.listeners = FleetListeners(self.files, "127.0.0.1", claim_ports("127.0.0.1", 0, NUM_PORTS))

    def start(self, port=0):
        """Start the fleet's broker; `port` is the coordinator's."""
        return EmbeddedBroker.start(self.folder / "run" / "broker", port=port, fleet=self.listeners)

    def register(self, device, *, kind="certificate", secret="", key=""):
        device = RegisteredDevice(
            id=device,
            name=device,
            renamed=False,
            kind=kind,
            state="accepted",
            tags=(),
            key=key or device,
            secret=hash_of(secret) if secret else "",
            ends_at=time.time() + 1000.0,
            authority="",
            bundle="",
            joined_at=time.time(),
            last_seen=None,
            agent="",
        )
        with Registry.open(self.files.registry) as registry:
            registry.put(device)

    def with_certificate(self, device, *, now=None):
        """Register a device; its address of the broker, and that of its second connection."""
        self.register(device)
        now = time.time() if now is None else now
        made, key = certificates(self.authority, self.folder / device, device, now)
        with Registry.open(self.files.registry) as registry:
            issued = (made.certificate, made.probe_certificate)
            registry.note_certificates(
                device, issued, made.serials, ends_at=made.ends_at, authority=made.authority
            )
        files = [self.folder / device / "device.pem", self.folder / device / "probe.pem"]
        for file, pem in zip(files, issued, strict=True):
            file.write_text(pem)
        return [self.at(self.listeners.port, cert=str(file), key=str(key)) for file in files]

    def with_secret(self, device, secret="a-secret"):
        """Register a device; its address of the broker, and that of its second connection."""
        self.register(device, kind="secret", secret=secret)
        self.write_access()
        users = (device, f"{device}~probe")
        return [self.at(self.listeners.port + 1, username=user, password=secret) for user in users]

    def at(self, port, **login):
        return Broker("127.0.0.1", port, tls=True, ca=str(self.files.authority), **login)

    def revoke(self, device):
        with Registry.open(self.files.registry) as registry:
            registry.revoke(device)
        self.write_access()

    def write_access(self):
        with Registry.open(self.files.registry) as registry:
            write_access_files(self.authority, registry, time.time())


def certificates(authority, folder, device, now):
    """Certificates of a device with a new key, and the file of the key."""
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    request = (
        x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    ).public_bytes(serialization.Encoding.PEM)
    (folder / "device.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return authority.certify(device_key(request.decode()), device, now), folder / "device.key"
