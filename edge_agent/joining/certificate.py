"""Reads the dates between which an X.509 certificate is valid.

The standard library reports these dates only for certificates that it trusts.
"""

import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from fleetune.protocols.errors import TransportError
from fleetune.protocols.input_files import MAX_SETTINGS_BYTES, read_input

_SEQUENCE, _VERSION, _UTC_TIME, _GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18
_END = "-----END CERTIFICATE-----"


def validity_of_broker(der: bytes) -> tuple[datetime, datetime]:
    """Times `notBefore` and `notAfter` of the certificate that the broker sent.

    Raises:
        TransportError: the bytes are not a certificate.
    """
    try:
        return _validity(der)
    except (ValueError, IndexError):
        raise TransportError("the broker sent no X.509 certificate; check that its port speaks TLS") from None


def validity_of_file(path: Path) -> tuple[datetime, datetime]:
    """Times `notBefore` and `notAfter` of the first certificate in a PEM file.

    Raises:
        TransportError: the file cannot be read, or holds no certificate.
    """
    data = read_input(path, MAX_SETTINGS_BYTES, error=TransportError)
    text = data.decode("ascii", errors="replace")
    start = text.find("-----BEGIN CERTIFICATE-----")
    end = text.find(_END, start)
    if start < 0 or end < 0:
        raise TransportError(f"{path} holds no certificate; give a PEM file")
    try:
        return _validity(ssl.PEM_cert_to_DER_cert(text[start : end + len(_END)]))
    except (ValueError, IndexError):
        raise TransportError(f"the certificate in {path} is damaged; copy the file again") from None


def _validity(der: bytes) -> tuple[datetime, datetime]:
    """Return the times in a certificate (RFC 5280, section 4.1).

    Raises:
        ValueError, IndexError: the bytes are not a certificate.
    """
    (_, certificate), *_ = _children(der)
    (_, signed), *_ = _children(certificate)
    fields = [value for tag, value in _children(signed) if tag != _VERSION]
    first, last = (_time(tag, value) for tag, value in _children(fields[3]))
    return first, last


def _children(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield tag and content of the elements of a DER sequence.

    Raises:
        ValueError, IndexError: the bytes are not such a sequence.
    """
    at = 0
    while at < len(data):
        tag, length, at = data[at], data[at + 1], at + 2
        if length & 0x80:
            width = length & 0x7F
            length, at = int.from_bytes(data[at : at + width]), at + width
        if at + length > len(data):
            raise ValueError("cut short")
        yield tag, data[at : at + length]
        at += length


def _time(tag: int, value: bytes) -> datetime:
    """Return a time in a certificate. Two digits of a year mean 1950 to 2049 (RFC 5280, section 4.1.2.5.1).

    Raises:
        ValueError: the bytes are not a time.
    """
    text = value.decode("ascii")
    if tag == _UTC_TIME:
        text = ("19" if int(text[:2]) >= 50 else "20") + text
    elif tag != _GENERALIZED_TIME:
        raise ValueError("not a time")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)
