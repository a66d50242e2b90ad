"""The fleets that this device has joined, stored below its state folder.

`STATE/.joined/FLEET` can be entered by its owner only, and holds:
    device.pem      key and certificate of the device
    probe.pem       the same key, with the certificate of its second connection
    authority.pem   the authority whose servers the device trusts
    fleet.json      device, name and the broker's address; it is written last, when the device has joined
    pending.json    a key and its signing request, until the answer is stored

Each file is replaced at once, and each works with an older version of the others. So a device that is
stopped at any moment can still connect.
"""

import re
import ssl
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import msgspec
from msgspec import Struct

from fleetune.edge_agent.joining.certificate import validity_of_file
from fleetune.edge_agent.joining.signing_request import KeyAndRequest
from fleetune.protocols.bounds import FleetName
from fleetune.protocols.errors import SettingError, StoreError, TransportError
from fleetune.protocols.files import (
    keep_private,
    make_folder,
    remove,
    remove_empty,
    remove_tree,
    write_atomically,
)
from fleetune.protocols.input_files import MAX_SETTINGS_BYTES, read_input
from fleetune.protocols.wire.transport.mqtt import Broker
from fleetune.protocols.wire.transport.tls import fleet_context

JOINED = ".joined"
_DEVICE, _PROBE, _AUTHORITY, _FLEET, _PENDING = (
    *("device.pem", "probe.pem", "authority.pem"),
    *("fleet.json", "pending.json"),
)
_KEY = re.compile(r"-----BEGIN PRIVATE KEY-----\n[A-Za-z0-9+/=\n]+-----END PRIVATE KEY-----\n")


class Certificates(Struct, frozen=True):
    """What an authority gives a device: its two certificates and the authority's own, all in PEM."""

    certificate: str
    probe_certificate: str
    authority: str


class _Record(Struct, frozen=True):
    """The content of fleet.json."""

    fleet: FleetName
    device: FleetName
    name: str
    host: str
    port: int
    version: int = 1


@dataclass(frozen=True)
class Credentials:
    """The folder with a device's key and certificates for one fleet. It may be empty."""

    folder: Path

    @classmethod
    def of(cls, state: Path, fleet: str) -> "Credentials":
        """Return those of a fleet, below the folder of `--state`."""
        return cls(state / JOINED / fleet)

    @property
    def device(self) -> Path:
        return self.folder / _DEVICE

    @property
    def probe(self) -> Path:
        return self.folder / _PROBE

    @property
    def authority(self) -> Path:
        return self.folder / _AUTHORITY

    @property
    def key(self) -> str:
        """The device's present key in PEM; "" if it has none. Raises StoreError.

        Two files hold it, and one of them may be damaged.
        """
        found = (_KEY.match(_read(path)) for path in (self.device, self.probe))
        return next((one[0] for one in found if one is not None), "")

    def pending(self) -> KeyAndRequest | None:
        """Return the key and the request whose answer is not stored yet; None if there is none.

        Raises:
            StoreError: the file cannot be read.
        """
        text = _read(self.folder / _PENDING)
        try:
            return msgspec.json.decode(text, type=KeyAndRequest) if text else None
        except msgspec.MsgspecError:
            return None  # no program writes this file in part, so nothing that was sent is lost

    def keep_pending(self, made: KeyAndRequest) -> None:
        """Store a key before its request is sent. Raises StoreError."""
        make_folder(self.folder)
        keep_private(self.folder.parent)
        write_atomically(self.folder / _PENDING, msgspec.json.encode(made))

    def keep(self, key: str, given: Certificates) -> None:
        """Store a key with its certificates. The old key works until the new one is on the disk.

        Raises:
            StoreError: the certificates do not belong to the key, or a file cannot be written.
        """
        self._check(key, given)
        write_atomically(self.authority, given.authority.encode())
        write_atomically(self.probe, f"{key}{given.probe_certificate}".encode())
        write_atomically(self.device, f"{key}{given.certificate}".encode())
        remove(self.folder / _PENDING)

    def _check(self, key: str, given: Certificates) -> None:
        draft = self.folder / f"{_DEVICE}.check"  # OpenSSL reads keys from files only
        try:
            for certificate in (given.certificate, given.probe_certificate):
                write_atomically(draft, f"{key}{certificate}".encode(), durable=False)
                fleet_context(given.authority).load_cert_chain(draft)
        except (ssl.SSLError, ValueError):
            raise StoreError(
                "the coordinator sent certificates that do not belong to this device's key; join again"
            ) from None
        finally:
            remove(draft, durable=False)

    def valid_until(self) -> datetime:
        """Return the end of the device's certificate. Raises TransportError: it cannot be read."""
        return validity_of_file(self.device)[1]


@dataclass(frozen=True)
class JoinedFleet:
    """A fleet that this device has joined.

    Attributes:
        credentials: the device's key and certificates.
        fleet: name of the fleet.
        device: the device's id in this fleet.
        name: the device's name for people, as given when it joined.
        host, port: address of the fleet's broker.
    """

    credentials: Credentials
    fleet: str
    device: str
    name: str
    host: str
    port: int

    @property
    def broker(self) -> Broker:
        """The fleet's broker, with this device's credentials."""
        return Broker(
            self.host,
            self.port,
            tls=True,
            ca=str(self.credentials.authority),
            cert=str(self.credentials.device),
            probe_cert=str(self.credentials.probe),
            joined=True,
        )

    def stored_again(self) -> "JoinedFleet":
        """Return the fleet as it is stored now: another `join` may have changed the broker's address.

        Raises:
            StoreError: the file cannot be read, or is damaged.
        """
        return _joined(self.credentials.folder)

    def keep(self) -> None:
        """Record that the device has joined. Raises StoreError."""
        record = _Record(self.fleet, self.device, self.name, self.host, self.port)
        write_atomically(self.credentials.folder / _FLEET, msgspec.json.encode(record))


def joined_fleets(state: Path) -> list[JoinedFleet]:
    """Return the fleets that this device has joined, by name.

    Raises:
        StoreError: a file cannot be read, or is damaged.
    """
    return [_joined(folder) for folder in _folders(state)]


def joined_fleet(state: Path, fleet: str | None = None) -> JoinedFleet | None:
    """Return the fleet of this name that this device has joined, or the only one; None if there is none.

    Raises:
        SettingError: no name is given, and the device has joined several fleets.
        StoreError: a file cannot be read, or is damaged.
    """
    found = [_joined(folder) for folder in _folders(state) if fleet in (None, folder.name)]
    if len(found) > 1:
        names = ", ".join(one.fleet for one in found)
        raise SettingError(f"this device has joined several fleets: {names}; choose one with --fleet")
    return found[0] if found else None


def forget(joined: JoinedFleet) -> None:
    """Remove a device's key and certificates for a fleet. Raises StoreError."""
    folder = joined.credentials.folder
    remove(folder / _FLEET)  # first, so that nothing else is used if this is interrupted
    remove_tree(folder)
    remove_empty(folder.parent)


def _folders(state: Path) -> list[Path]:
    return [path.parent for path in sorted((state / JOINED).glob(f"*/{_FLEET}"))]


def _joined(folder: Path) -> JoinedFleet:
    path = folder / _FLEET
    try:
        found = msgspec.json.decode(_read(path), type=_Record)
    except msgspec.MsgspecError:
        raise StoreError(f"{path} is damaged; join again with edge-agent join") from None
    return JoinedFleet(Credentials(folder), found.fleet, found.device, found.name, found.host, found.port)


def _read(path: Path) -> str:
    """Return the text of one of these files; "" if it is missing. Raises StoreError."""
    if not path.exists():
        return ""
    try:
        return read_input(path, MAX_SETTINGS_BYTES, error=TransportError).decode("ascii", errors="replace")
    except (OSError, TransportError) as problem:
        raise StoreError(f"{problem}; run this as the user that joined") from None
