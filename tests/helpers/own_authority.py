"""An authority of a test, which signs what the tests of TLS need, wrong certificates too."""

import ssl
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fleetune.protocols.wire.join_exchange import fingerprint_of

DAY = timedelta(days=1)


def new_key():
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key):
    kind, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, kind, plain).decode()


def pem(certificate):
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def name_of(text):
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


@dataclass
class OwnAuthority:
    """An authority whose certificate is valid from `begins` on."""

    begins: datetime = field(default_factory=lambda: datetime.now(UTC) - DAY)

    def __post_init__(self):
        self.key, self.name = new_key(), name_of("fleet")
        self.certificate = self._builder(self.name, self.key.public_key(), self.begins, 3650 * DAY)
        self.certificate = self.certificate.add_extension(x509.BasicConstraints(True, None), True)
        self.certificate = self.certificate.sign(self.key, hashes.SHA256())

    @property
    def pem(self):
        return pem(self.certificate)

    @property
    def fingerprint(self):
        return fingerprint_of(ssl.PEM_cert_to_DER_cert(self.pem))

    def _builder(self, subject, public, begins, life):
        found = x509.CertificateBuilder().subject_name(subject).issuer_name(self.name).public_key(public)
        found = found.serial_number(x509.random_serial_number())
        return found.not_valid_before(begins).not_valid_after(begins + life)

    def signed(self, common_name, public, *, client=True, begins=None, life=365 * DAY):
        """A certificate of a device or a server, in PEM."""
        usage = ExtendedKeyUsageOID.CLIENT_AUTH if client else ExtendedKeyUsageOID.SERVER_AUTH
        made = self._builder(name_of(common_name), public, begins or datetime.now(UTC) - DAY, life)
        made = made.add_extension(x509.ExtendedKeyUsage([usage]), False)
        return pem(made.sign(self.key, hashes.SHA256()))

    def server(self, folder, **how):
        """Files of a server's certificate and key, which names no address of this machine."""
        key = new_key()
        cert, secret = folder / "server.pem", folder / "server.key"
        cert.write_text(self.signed("coordinator", key.public_key(), client=False, **how))
        secret.write_text(key_pem(key))
        return cert, secret

    def for_request(self, request, device, **how):
        """The two certificates of a device, by its signing request."""
        public = x509.load_pem_x509_csr(request.encode()).public_key()
        return [self.signed(name, public, **how) for name in (device, f"{device}~probe")]

    def revoked(self, certificate):
        """A revocation list with this certificate, in PEM."""
        serial, now = x509.load_pem_x509_certificate(certificate.encode()).serial_number, datetime.now(UTC)
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now - DAY).build()
        made = x509.CertificateRevocationListBuilder().issuer_name(self.name)
        made = made.last_update(now - DAY).next_update(now + DAY).add_revoked_certificate(entry)
        return pem(made.sign(self.key, hashes.SHA256()))
