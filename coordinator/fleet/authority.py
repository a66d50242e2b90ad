"""A fleet's certificate authority: it signs the certificates of the broker, of devices, and revocation lists.

All keys are P-256. The certificate of an authority is valid for ten years, a server's for 90 days, a device's
for a year.

A machine's clock may be wrong, above all at its first start. So certificates and revocation lists begin in
1970, and count their life from this release if the clock shows an earlier date. Only a server's certificate
begins a day in the past, because it shows a device that the device's clock is behind.

An authority can be replaced. Then `authority.pem` holds the new certificate and the old one, and both are
trusted. The server's file also holds the new authority's certificate signed by the old authority, so that a
device that knows only the old one accepts the server.

This is the only module of the coordinator that imports `cryptography`, which takes 10 MB of memory, so it
imports it inside functions.
"""

import hashlib
import ipaddress
import logging
import re
import ssl
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from fleetune.coordinator.fleet.fleet_folder import FleetFolder
from fleetune.coordinator.fleet.registry import Registry
from fleetune.protocols.errors import PacketCorrupt, StoreError
from fleetune.protocols.files import keep_private, locked, make_folder, write_atomically
from fleetune.protocols.wire.join_exchange import fingerprint_of
from fleetune.protocols.wire.topics import PROBE
from fleetune.protocols.wire.transport.tls import AUTHORITY_NAME

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey

    Pair = tuple[x509.Certificate, EllipticCurvePrivateKey]
    Extension = tuple[x509.ExtensionType, bool]  # and whether it is critical

log = logging.getLogger(__name__)

DAY_S = 86_400
AUTHORITY_DAYS, SERVER_DAYS, DEVICE_DAYS = 3650, 90, 365
RENEWED_AFTER = 2 / 3  # of a certificate's life
ROTATED_DAYS = 2 * DEVICE_DAYS  # before its end; devices that are away for a year still get the new authority
BEGIN = (
    0.0  # 1970-01-01, before which no clock is; it protects nothing that a certificate is not used earlier
)
RELEASED_AT = 1_767_225_600.0  # 2026-01-01: a clock that shows an earlier date is wrong
MAX_HOSTS = 60  # names and addresses in a server's certificate
MAX_COMMON_NAME = 64  # X.520
_PEM = re.compile(r"-----BEGIN ([A-Z0-9 ]+)-----\n.*?-----END \1-----\n", re.DOTALL)
_HOST = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,62}))*")


@dataclass(frozen=True)
class DeviceKey:
    """A device's public key, from a signing request whose signature was checked.

    Attributes:
        sha256: SHA-256 of the key (SubjectPublicKeyInfo in DER), in hexadecimal.
        public: the key.
    """

    sha256: str
    public: "EllipticCurvePublicKey"


@dataclass(frozen=True)
class DeviceCertificates:
    """The two certificates of a device, in PEM.

    Attributes:
        certificate: its common name is the device's id.
        probe_certificate: its common name is `DEVICE~probe`.
        serials: the serial numbers of both, in hexadecimal.
        ends_at: when both end, in seconds since 1970.
        authority: fingerprint of the authority that signed them.
    """

    certificate: str
    probe_certificate: str
    serials: tuple[str, str]
    ends_at: float
    authority: str


@dataclass(frozen=True)
class Authority:
    """The authority of a fleet. All methods read its files anew, because another process may replace them."""

    folder: FleetFolder

    @classmethod
    def open(cls, folder: FleetFolder, now: float) -> Self:
        """Return the authority of a fleet; make it if there is none.

        Args:
            folder: the fleet's folder; it is created if needed.
            now: seconds since 1970.

        Raises:
            StoreError: a file is damaged, or cannot be read or written; or both are missing, but devices have
                joined.
        """
        made = cls(folder)
        make_folder(folder.path)
        keep_private(folder.path)
        with made.locked():
            if not folder.authority.exists():
                if not folder.authority_key.exists():
                    _check_empty(folder)
                keys = made._keys() if folder.authority_key.exists() else []
                key = keys[0] if keys else _new_key()
                made._write_keys([key])  # before its certificate, so that no certificate lacks its key
                write_atomically(folder.authority, _pem(_authority_certificate(folder.fleet, key, now)))
        return made

    @property
    def bundle(self) -> str:
        """The certificates in PEM that devices trust; the one that signs is first. Raises StoreError."""
        return self._read(self.folder.authority)

    @property
    def bundle_id(self) -> str:
        """A name of the bundle's content, for comparing what a device has. Raises StoreError."""
        return hashlib.sha256(self.bundle.encode()).hexdigest()[:16]

    @property
    def fingerprints(self) -> list[str]:
        """The fingerprints of the bundle's certificates, in its order. Raises StoreError."""
        return [fingerprint_of(ssl.PEM_cert_to_DER_cert(one)) for one in self._parts(self.folder.authority)]

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the authority that signs. Raises StoreError."""
        return self.fingerprints[0]

    @property
    def made_at(self) -> float:
        """When the authority that signs was made, in seconds since 1970. Raises StoreError."""
        return self._pairs()[0][0].not_valid_after_utc.timestamp() - AUTHORITY_DAYS * DAY_S

    def renew_server(self, hosts: Iterable[str], now: float) -> bool:
        """Make the server's certificate anew if it is needed, and return True if it was made.

        It is needed if there is none or it is damaged, if two thirds of its life are over, if it lacks a name
        or address, or if another authority signs now. The key stays unless it is missing or damaged.

        Args:
            hosts: names and addresses of this machine; the first 60 are used.
            now: seconds since 1970.

        Raises:
            StoreError: a file of the authority is damaged, or cannot be read or written, or it has ended.
        """
        wanted = [host for host in dict.fromkeys(hosts) if _general_name(host)][:MAX_HOSTS]
        with self.locked():
            key = self._server_key()
            if not self._server_is_due(key, wanted, now):
                return False
            made = [_server_certificate(self._signer(now), key, wanted, now), *self._chain(now)]
            write_atomically(self.folder.server, b"".join(_pem(one) for one in made))
            return True

    def certify(self, key: DeviceKey, device: str, now: float) -> DeviceCertificates:
        """Sign both certificates of a device. Raises StoreError."""
        signer = self._signer(now)
        one, probe = (
            _device_certificate(signer, key.public, name, now) for name in (device, f"{device}~{PROBE}")
        )
        return DeviceCertificates(
            _pem(one).decode(),
            _pem(probe).decode(),
            (f"{one.serial_number:x}", f"{probe.serial_number:x}"),
            one.not_valid_after_utc.timestamp(),
            self.fingerprint,
        )

    def revocation_list(self, serials: Iterable[str], now: float) -> bytes:
        """Return one revocation list in PEM for each authority that is trusted. Raises StoreError.

        Each names all serial numbers, because they are random, so no two authorities share one.
        """
        revoked = [int(serial, 16) for serial in serials]
        return b"".join(_pem(_revocation_list(*pair, revoked, now)) for pair in self._pairs())

    def rotate(self, now: float, *, at_once: bool = False) -> None:
        """Replace the authority; afterwards, make the server's certificate and the revocation list anew.

        Args:
            now: seconds since 1970.
            at_once: True to trust no other authority any more, e.g. because a key was stolen. Every device
                must then join again.

        Raises:
            StoreError: a file is damaged, or cannot be read or written.
        """
        with self.locked():
            old, key = self._pairs()[0], _new_key()
            kept = [] if at_once else [old]
            made = _authority_certificate(self.folder.fleet, key, now)
            self._write_keys([key, old[1]])  # each certificate finds its key, whichever file a crash leaves
            write_atomically(
                self.folder.authority, b"".join(_pem(one) for one in (made, *[c for c, _ in kept]))
            )
            if at_once:
                self._write_keys([key])
                write_atomically(self.folder.server_key, _key_pem(_new_key()))

    def rotate_before_end(self, now: float) -> bool:
        """Replace the authority if it ends within two years, and return True if it was replaced.

        An authority that has ended stays, because the clock may be wrong.

        Raises:
            StoreError: a file is damaged, or cannot be read or written.
        """
        (signer, _), *old = self._pairs()
        left_s = signer.not_valid_after_utc.timestamp() - now
        if old or not 0 < left_s < ROTATED_DAYS * DAY_S:
            return False
        self.rotate(now)
        log.warning(
            "the authority of fleet %s ends in %d days; devices get a new one",
            self.folder.fleet,
            left_s / DAY_S,
        )
        return True

    def drop_old(self) -> None:
        """Stop trusting all authorities but the one that signs, and forget their keys. Raises StoreError."""
        with self.locked():
            certificate, key = self._pairs()[0]
            write_atomically(self.folder.authority, _pem(certificate))
            self._write_keys([key])

    def _pairs(self) -> "list[Pair]":
        """Return the bundle's certificates with their keys; the pair that signs is first."""
        from cryptography import x509

        keys = {_spki(key.public_key()): key for key in self._keys()}
        with _reading(self.folder.authority):
            found = [
                x509.load_pem_x509_certificate(one.encode()) for one in self._parts(self.folder.authority)
            ]
            return [(one, keys[_spki(one.public_key())]) for one in found]

    def _signer(self, now: float) -> "Pair":
        """Return the pair that signs. Raises StoreError if its life has not begun or is over."""
        found, key = self._pairs()[0]
        begins, ends = found.not_valid_before_utc, found.not_valid_after_utc
        if begins.timestamp() <= now < ends.timestamp():
            return found, key
        raise StoreError(
            f"the authority of fleet {self.folder.fleet} is valid from {begins:%Y-%m-%d} to {ends:%Y-%m-%d},"
            f" and this machine's clock shows {_date(now):%Y-%m-%d}; set the clock. If it is right, run"
            f" `edge-coordinator rotate-authority {self.folder.fleet} --now`, and let every device join again"
        )

    def _keys(self) -> "list[EllipticCurvePrivateKey]":
        return [
            _private_key(one, self.folder.authority_key) for one in self._parts(self.folder.authority_key)
        ]

    def _write_keys(self, keys: "Iterable[EllipticCurvePrivateKey]") -> None:
        write_atomically(self.folder.authority_key, b"".join(_key_pem(key) for key in keys))

    def _server_key(self) -> "EllipticCurvePrivateKey":
        path = self.folder.server_key
        try:
            return _private_key(self._read(path), path)
        except StoreError:  # missing or damaged
            made = _new_key()
            write_atomically(path, _key_pem(made))
            return made

    def _server_is_due(self, key: "EllipticCurvePrivateKey", hosts: list[str], now: float) -> bool:
        from cryptography import x509

        if not (chain := self._server_chain()):
            return True
        found = chain[0]
        begins_at, ends_at = found.not_valid_before_utc.timestamp(), found.not_valid_after_utc.timestamp()
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return (
            is_due(begins_at, ends_at, now)
            or (begins_at < RELEASED_AT - DAY_S and now >= RELEASED_AT)  # made before the clock was set
            or found.issuer != self._pairs()[0][0].subject
            or _spki(found.public_key()) != _spki(key.public_key())
            or not {_general_name(host) for host in hosts} <= set(names)
        )

    def _server_chain(self) -> "list[x509.Certificate]":
        """Return the certificates of the server's file; none if it is missing, or damaged anywhere."""
        from cryptography import x509

        try:
            text = self.folder.server.read_bytes()
            found = x509.load_pem_x509_certificates(text)
            found[0].extensions.get_extension_for_class(x509.SubjectAlternativeName)
        except (OSError, ValueError, x509.ExtensionNotFound):
            return []
        # OpenSSL refuses the whole file for a block that `cryptography` overlooks
        return found if b"".join(_pem(one) for one in found) == text else []

    def _chain(self, now: float) -> "list[x509.Certificate]":
        """Return the certificates in which older authorities signed the present one, while these last."""
        (signer, _), *old = self._pairs()
        made = [_cross_certificate(signer, *pair) for pair in old] + self._server_chain()[1:]
        lasting = [one for one in made if one.not_valid_after_utc.timestamp() > now]
        return list({one.issuer: one for one in lasting if one.subject == signer.subject}.values())

    def _read(self, path: Path) -> str:
        try:
            return path.read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError) as problem:
            raise _damaged(path, problem) from None

    def _parts(self, path: Path) -> list[str]:
        found = [one[0] for one in _PEM.finditer(self._read(path))]
        if not found:
            raise _damaged(path, "it has no PEM block")
        return found

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Let no other process change the authority's files during this context."""
        with locked(self.folder.path / "lock"):
            yield


def device_key(signing_request: str) -> DeviceKey:
    """Return the key of a signing request in PEM (PKCS #10), of which nothing else is used.

    Raises:
        PacketCorrupt: it cannot be read, its key is not P-256, or it is not signed with this key.
    """
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        found = x509.load_pem_x509_csr(signing_request.encode())
        key = found.public_key()
        # first, because checking the signature of a huge RSA key takes seconds
        if not (isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1)):
            raise PacketCorrupt(
                "the signing request has another key than P-256; make one with `edge-agent join`"
            )
        if not found.is_signature_valid:
            raise PacketCorrupt("the signing request is not signed with its own key; make it anew")
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise PacketCorrupt(
            "the signing request cannot be read; send a PKCS #10 request in PEM with a P-256 key"
        ) from None
    return DeviceKey(hashlib.sha256(_spki(key)).hexdigest(), key)


def device_ends_at(now: float) -> float:
    """Return when a certificate or secret ends that a device gets at `now`, in seconds since 1970."""
    return max(now, RELEASED_AT) + DEVICE_DAYS * DAY_S


def is_due(begins_at: float, ends_at: float, now: float) -> bool:
    """True if two thirds of a certificate's life are over, or its life has not begun."""
    return not 0 <= now - begins_at < (ends_at - begins_at) * RENEWED_AFTER


def _new_key() -> "EllipticCurvePrivateKey":
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _private_key(pem: str, path: Path) -> "EllipticCurvePrivateKey":
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    with _reading(path):
        key = load_pem_private_key(pem.encode(), None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise _damaged(path, "its key is not P-256")
    return key


def _authority_certificate(fleet: str, key: "EllipticCurvePrivateKey", now: float) -> "x509.Certificate":
    # The name tells two authorities of a fleet apart.
    name = _name(f"{AUTHORITY_NAME}{hashlib.sha256(_spki(key.public_key())).hexdigest()[:16]}", fleet)
    ends_at = max(now, RELEASED_AT) + AUTHORITY_DAYS * DAY_S
    return _authority(name, key.public_key(), name, key, ends_at, 1)


def _cross_certificate(
    signed: "x509.Certificate", by: "x509.Certificate", key: "EllipticCurvePrivateKey"
) -> "x509.Certificate":
    """Return the certificate in which an old authority signs the key of a new one."""
    until = by.not_valid_after_utc.timestamp()
    return _authority(signed.subject, signed.public_key(), by.subject, key, until, 0)


def _authority(
    subject: "x509.Name",
    public: Any,
    issuer: "x509.Name",
    key: "EllipticCurvePrivateKey",
    ends_at: float,
    path_length: int,
) -> "x509.Certificate":
    from cryptography import x509

    basic = x509.BasicConstraints(ca=True, path_length=path_length)
    extensions: list[Extension] = [(basic, True), (_usage(signs_others=True), True)]
    return _signed(subject, public, (issuer, key), (BEGIN, ends_at), extensions)


def _server_certificate(
    signer: "Pair", key: "EllipticCurvePrivateKey", hosts: list[str], now: float
) -> "x509.Certificate":
    from cryptography import x509

    names = [name for name in map(_general_name, hosts) if name is not None]
    extensions: list[Extension] = [(x509.SubjectAlternativeName(names or [x509.DNSName("localhost")]), False)]
    # with a clock that is surely wrong, it lasts as long as the authority, for devices whose clocks are right
    days = AUTHORITY_DAYS if now < RELEASED_AT else SERVER_DAYS
    life = now - DAY_S, max(now, RELEASED_AT) + days * DAY_S
    return _leaf(signer, key.public_key(), "Fleetune coordinator", life, "SERVER_AUTH", extensions)


def _device_certificate(
    signer: "Pair", key: "EllipticCurvePublicKey", common_name: str, now: float
) -> "x509.Certificate":
    return _leaf(signer, key, common_name, (BEGIN, device_ends_at(now)), "CLIENT_AUTH", [])


def _leaf(
    signer: "Pair",
    public: Any,
    common_name: str,
    life: tuple[float, float],
    purpose: str,
    more: "list[Extension]",
) -> "x509.Certificate":
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    extensions: list[Extension] = [
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_usage(signs_others=False), True),
        (x509.ExtendedKeyUsage([getattr(ExtendedKeyUsageOID, purpose)]), False),
        *more,
    ]
    begins_at, ends_at = life[0], min(life[1], signer[0].not_valid_after_utc.timestamp())
    return _signed(
        _name(common_name), public, (signer[0].subject, signer[1]), (begins_at, ends_at), extensions
    )


def _signed(
    subject: "x509.Name",
    public: Any,
    issuer: "tuple[x509.Name, EllipticCurvePrivateKey]",
    life: tuple[float, float],
    extensions: "list[Extension]",
) -> "x509.Certificate":
    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA256

    name, key = issuer
    begins_at, ends_at = life
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(name)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_date(begins_at))
        .not_valid_after(_date(ends_at))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(_issuer_id(key), critical=False)
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical=critical)
    return builder.sign(key, SHA256())


def _revocation_list(
    certificate: "x509.Certificate", key: "EllipticCurvePrivateKey", serials: list[int], now: float
) -> "x509.CertificateRevocationList":
    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA256

    begins = _date(BEGIN)
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(certificate.subject)
        .last_update(begins)
        .next_update(certificate.not_valid_after_utc)  # an expired list would lock out every device
        .add_extension(_issuer_id(key), critical=False)
        .add_extension(x509.CRLNumber(int(now)), critical=False)
    )
    for serial in serials:
        one = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(begins).build()
        builder = builder.add_revoked_certificate(one)
    return builder.sign(key, SHA256())


def _issuer_id(key: "EllipticCurvePrivateKey") -> "x509.AuthorityKeyIdentifier":
    from cryptography import x509

    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())


def _usage(*, signs_others: bool) -> "x509.KeyUsage":
    from cryptography import x509

    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    unused = dict.fromkeys((*others, "encipher_only", "decipher_only"), False)
    return x509.KeyUsage(
        digital_signature=not signs_others, key_cert_sign=signs_others, crl_sign=signs_others, **unused
    )


def _name(common_name: str, organization: str = "") -> "x509.Name":
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    parts = [(NameOID.ORGANIZATION_NAME, organization), (NameOID.COMMON_NAME, common_name)]
    return x509.Name([x509.NameAttribute(kind, text) for kind, text in parts if text])


def _general_name(host: str) -> "x509.GeneralName | None":
    """Return a name or address for a server's certificate; None if a certificate cannot have it."""
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host) if _HOST.fullmatch(host) else None


def _date(at: float) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=int(at))  # also after 2038 on 32 bits


def _spki(key: Any) -> bytes:
    """Return a public key in DER."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return bytes(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))


def _pem(signed: "x509.Certificate | x509.CertificateRevocationList") -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return signed.public_bytes(Encoding.PEM)


def _key_pem(key: "EllipticCurvePrivateKey") -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, KeyError) as problem:
        raise _damaged(path, problem) from None


def _check_empty(folder: FleetFolder) -> None:
    """Raises StoreError if devices have joined, which a new authority would lock out."""
    if folder.registry.exists():
        with Registry.open(folder.registry) as registry:
            if number := len(registry.devices()):
                missing = FileNotFoundError(0, f"it is missing, but {number} devices have joined")
                raise _damaged(folder.authority_key, missing)


def _damaged(path: Path, problem: object) -> StoreError:
    words = getattr(problem, "strerror", None) or "it is damaged"
    return StoreError(
        f"cannot use {path}: {words}; restore the folder {path.parent} from a backup. Without it, remove the"
        " folder and let every device join again"
    )
