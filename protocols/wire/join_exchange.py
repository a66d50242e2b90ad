"""The exchange by which a device joins a fleet, over HTTPS, before it has an identity.

An invitation is one line of text, which can be shown as a QR code:

    fleetune://HOST:PORT/FLEET/CODE/FINGERPRINT

1. The device asks for `GET /fleetune/v1/authority` without checking the server's certificate, and sends
   nothing about itself. It continues only if a certificate in the answer has this FINGERPRINT.
2. It connects again, and accepts only a server certificate that this authority has signed. The authority
   signs server certificates for its coordinator only, so the server's address is not checked.
3. It sends a `JoinRequest` to `POST /fleetune/v1/join`, and gets `Joined` (status 200), `JoinPending` (202)
   or `JoinRefused` (another status). A device that gets no answer, or `JoinPending`, sends the same request
   again. The same code with the same signing request is one joining, however often it is sent.
"""

import base64
import hashlib
import re
from typing import Annotated

from msgspec import Meta, Struct

from fleetune.protocols.bounds import FleetName, Nonce, Pem, Words
from fleetune.protocols.errors import SettingError
from fleetune.protocols.wire.identity import MAX_NAME
from fleetune.protocols.wire.transport.mqtt import in_url

AUTHORITY_PATH, JOIN_PATH = "/fleetune/v1/authority", "/fleetune/v1/join"
MAX_JOIN_BYTES = 16_384  # of a request or an answer
CODE_LENGTH, FINGERPRINT_LENGTH = 20, 32  # characters of base32: 100 and 160 bits

Code = Annotated[str, Meta(pattern=f"^[a-z2-7]{{{CODE_LENGTH}}}\\Z")]

_LINE = re.compile(
    r"fleetune://(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):(?P<port>[0-9]{1,5})/(?P<fleet>[A-Za-z0-9_-]{1,64})"
    rf"/(?P<code>[a-z2-7]{{{CODE_LENGTH}}})/(?P<fingerprint>[a-z2-7]{{{FINGERPRINT_LENGTH}}})"
)


class JoinRequest(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A device asks to join.

    Attributes:
        fleet: name of the fleet.
        code: the code of the invitation.
        signing_request: PKCS #10 request in PEM, with a P-256 key; its subject is ignored. "" asks for a user
            name and a secret, for peers that cannot hold a certificate.
        device: the id that the device wants, at most 58 characters; null lets the coordinator choose one.
        name: the device's name for people; "" for its id.
        agent: program and version.
        nonce: for a device without signing request: a random text of 16 characters or more, which it makes
            once. By it the coordinator recognises the same request when it is sent again.
    """

    fleet: FleetName
    code: Code
    signing_request: Pem = ""
    device: FleetName | None = None
    name: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    agent: Words = ""
    nonce: Nonce = ""


class Joined(Struct, frozen=True, omit_defaults=True):
    """The device has joined.

    Attributes:
        device: its id, which is the common name of its certificate, and part of its topics.
        name: its name for people.
        port: the broker's port for this kind of device; its host is that of the invitation.
        authority: the certificates in PEM that the device trusts from now on, as signers of the broker's.
        certificate: the device's certificate in PEM; "" for a device with a secret.
        probe_certificate: the same key with the common name `DEVICE~probe`, for the second connection, which
            measures the link.
        secret: the password that belongs to the user name `device`, and to `DEVICE~probe`; "" with a
            certificate.
        now: the coordinator's time in seconds since 1970, for devices without a clock.
    """

    device: FleetName
    name: str
    port: int
    authority: str
    certificate: Pem = ""
    probe_certificate: Pem = ""
    secret: str = ""
    now: float = 0.0


class JoinPending(Struct, frozen=True):
    """The device waits for an operator's approval; `again_s`: when to send the same request again."""

    device: FleetName
    again_s: float


class JoinRefused(Struct, frozen=True):
    """The device may not join; `reason` is one line that says why, and what to do."""

    reason: str


class JoinLine(Struct, frozen=True):
    """An invitation as one line of text.

    Attributes:
        host, port: address of the server of the exchange.
        fleet: name of the fleet.
        code: a code that may be used once, or by a stated number of devices. It is a secret.
        fingerprint: beginning of the SHA-256 of the authority's certificate, in base32.
    """

    host: str
    port: int
    fleet: str
    code: str
    fingerprint: str

    @classmethod
    def parse(cls, text: str) -> "JoinLine":
        """Read an invitation. Raises SettingError, whose text does not repeat the code."""
        found = _LINE.fullmatch(text.strip())
        if found is None or not 0 < int(found["port"]) < 65_536:
            raise SettingError(
                "this is no invitation: copy the whole line that `edge-coordinator invite` prints,"
                " fleetune://HOST:PORT/FLEET/CODE/FINGERPRINT"
            )
        host = found["host"].strip("[]")
        return cls(host, int(found["port"]), found["fleet"], found["code"], found["fingerprint"])

    def __str__(self) -> str:
        where = f"{in_url(self.host)}:{self.port}"
        return f"fleetune://{where}/{self.fleet}/{self.code}/{self.fingerprint}"

    def __repr__(self) -> str:  # without the code, for logs
        return f"fleetune://{in_url(self.host)}:{self.port}/{self.fleet}/..."


def fingerprint_of(der: bytes) -> str:
    """Return the fingerprint of a certificate in DER: the first 160 bits of its SHA-256, in base32."""
    digest = hashlib.sha256(der).digest()[: FINGERPRINT_LENGTH * 5 // 8]
    return base64.b32encode(digest).decode().lower()
