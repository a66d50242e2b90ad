"""TLS contexts of a client: for a fleet that the device has joined, and for any other broker.

The authority of a joined fleet signs server certificates only for the fleet's coordinator. So the address of
the server is not checked, and may change. OpenSSL accepts a device's certificate as that of a client only.
"""

import socket
import ssl
import time
from pathlib import Path
from typing import Any

from fleetune.protocols.errors import TransportError
from fleetune.protocols.input_files import MAX_SETTINGS_BYTES, read_input

NOT_YET_VALID, EXPIRED = 9, 10  # X509_V_ERR_CERT_* of openssl's x509_vfy.h
CLOCK_BEHIND = (
    "this device's clock is behind that of the fleet; dates of certificates are not checked until it is set"
)
AUTHORITY_NAME = "Fleetune authority "  # with it, the common name of a fleet's authority begins
_NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME


def fleet_context(authority: str, *, check_dates: bool = True) -> ssl.SSLContext:
    """Return a context that trusts servers with a certificate of this fleet's authority, and no others.

    Args:
        authority: the authority's certificates, in PEM.
        check_dates: False for a device whose clock is behind, which cannot judge dates.

    Raises:
        ssl.SSLError: `authority` has no certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.load_verify_locations(cadata=authority)
    if not check_dates:
        context.verify_flags |= _NO_CHECK_TIME
    return context


def pem_certificates(text: str) -> list[str]:
    """Return the certificates in a PEM text, each as PEM."""
    end = "-----END CERTIFICATE-----"
    parts = (part.partition("-----BEGIN CERTIFICATE-----") for part in text.split(end)[:-1])
    return [f"{begin}{body}{end}\n" for _, begin, body in parts if begin]


def broker_context(
    ca: str | None, cert: str | None, key: str | None, *, joined: bool, check_dates: bool = True
) -> ssl.SSLContext:
    """Return the context for a broker; for the arguments see `protocols.wire.transport.mqtt.Broker`.

    Raises:
        OSError, ValueError: a file is missing, unreadable or not as expected. SSLError is an OSError.
    """
    if joined:
        context = fleet_context(Path(ca or "").read_text(encoding="ascii"), check_dates=check_dates)
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if ca is None:
            context.load_default_certs()
        else:
            context.load_verify_locations(ca)
    if cert is not None:
        context.load_cert_chain(cert, key, password=no_phrase)
    return context


def is_fleet_authority(path: str, fleet: str) -> bool:
    """True if the first certificate in a PEM file is the authority that `serve` made for this fleet."""
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        text = read_input(Path(path), MAX_SETTINGS_BYTES, error=TransportError).decode("ascii", "replace")
        context.load_verify_locations(cadata=text)
        first: Any = context.get_ca_certs()[0]
    except (OSError, ValueError, IndexError, TransportError):
        return False  # the connection reports what is wrong with the file
    subject = {name: value for (name, value), *_ in first["subject"]}
    return subject.get("organizationName") == fleet and subject.get("commonName", "").startswith(
        AUTHORITY_NAME
    )


def no_phrase() -> str:
    """Return an empty pass phrase, because an agent runs without a person to enter one."""
    return ""


class TlsConnections:
    """Makes the TLS connections of one client. Paho uses it in place of an `ssl.SSLContext`.

    Each connection reads the files again, so that renewed certificates are used. If a broker of the fleet has
    a certificate that is not valid yet, this device's clock is behind: the next connections do not check
    dates, until the clock has passed that date.

    Args:
        ca, cert, key, joined: see `protocols.wire.transport.mqtt.Broker`.

    Attributes:
        check_hostname: True, so that paho leaves the check to OpenSSL.
        alert: OpenSSL's reason why the broker ended the last connection; None if it gave none.

    Raises:
        OSError, ValueError: as `broker_context`.
    """

    check_hostname = True

    def __init__(self, ca: str | None, cert: str | None, key: str | None, *, joined: bool) -> None:
        self._files, self._joined = (ca, cert, key), joined
        self._past_s = float("-inf")  # a time that has passed, in seconds since 1970
        self.alert: str | None = None
        broker_context(*self._files, joined=joined)
        self._socket_class = _noting(self)

    def wrap_socket(self, sock: socket.socket, **options: Any) -> ssl.SSLSocket:
        """Return the socket of a new connection, whose handshake has not begun."""
        self.alert = None
        context = broker_context(*self._files, joined=self._joined, check_dates=not self._is_clock_behind)
        context.sslsocket_class = self._socket_class
        return context.wrap_socket(sock, **options)

    @property
    def _is_clock_behind(self) -> bool:
        return time.time() < self._past_s

    def note_verified(self, line: ssl.SSLSocket) -> None:
        """Record a successful handshake."""
        if self._is_clock_behind:
            shown = line.getpeercert() or {}
            self._past_s = ssl.cert_time_to_seconds(str(shown["notBefore"]))

    def note_problem(self, problem: ssl.SSLError) -> None:
        """Record why a handshake failed or a connection ended."""
        if isinstance(problem, ssl.SSLCertVerificationError):
            if self._joined and problem.verify_code == NOT_YET_VALID:
                self._past_s = float("inf")
        elif problem.reason is not None:
            self.alert = problem.reason


def _noting(connections: TlsConnections) -> type[ssl.SSLSocket]:
    """Return a class of sockets that reports to `connections`, because paho drops the exceptions of reads."""

    class Line(ssl.SSLSocket):
        def do_handshake(self, block: bool = False) -> None:
            try:
                super().do_handshake(block)
            except ssl.SSLError as problem:
                connections.note_problem(problem)
                raise
            connections.note_verified(self)

        def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
            try:
                return super().recv(buflen, flags)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise
            except ssl.SSLError as problem:
                connections.note_problem(problem)
                raise

    return Line


def refused_certificate(alert: str, place: str, *, joined: bool) -> str | None:
    """Return one line if this alert refuses the client's certificate; None if it has another reason.

    Args:
        alert: OpenSSL's reason.
        place: the broker, for the line.
        joined: see `protocols.wire.transport.mqtt.Broker`.
    """
    again = "; join again with a new invitation: edge-agent join LINE"
    if "CERTIFICATE_REQUIRED" in alert and not joined:
        return (
            f"{place} requires a certificate; join its fleet (edge-agent join LINE), or give --cert and --key"
        )
    if "CERTIFICATE_EXPIRED" in alert:
        return f"{place}: this device's certificate has expired{again if joined else '; give a new --cert'}"
    if "CERTIFICATE_REVOKED" in alert:
        what = f"{place}: this device's certificate is revoked"
        undo = (
            "the fleet's operator can undo that (edge-coordinator approve), or, after forget, invite it anew"
        )
        return f"{what}; {undo}" if joined else what
    if any(sign in alert for sign in ("CERTIFICATE", "UNKNOWN_CA", "DECRYPT_ERROR")):
        remedy = again if joined else "; give a --cert that an authority of the broker has signed"
        return f"{place} does not accept this device's certificate ({alert.lower()}){remedy}"
    return None
