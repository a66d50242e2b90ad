"""Joining a fleet, in plain Python that shares nothing with the product (docs/wire.md, Joining a fleet)."""

import base64
import hashlib
import json
import re

LINE = re.compile(
    r"fleetune://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):([0-9]{1,5})/([A-Za-z0-9_-]{1,64})/([a-z2-7]{20})/([a-z2-7]{32})"
)
KINDS = {200: "joined", 202: "pending"}
COMMON_NAME = bytes.fromhex("0603550403")


def invitation(text):
    """The parts of an invitation; None if the text is none."""
    found = LINE.fullmatch(text.strip())
    if found is None or not 0 < int(found[2]) < 65_536:
        return None
    return {
        "host": found[1].strip("[]"),
        "port": int(found[2]),
        "fleet": found[3],
        "code": found[4],
        "fingerprint": found[5],
    }


def fingerprint(pem):
    """The fingerprint of a certificate."""
    return base64.b32encode(hashlib.sha256(der(pem)).digest()[:20]).decode().lower()


def certificates(bundle):
    """The certificates of a bundle, each in PEM."""
    return re.findall(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", bundle, re.DOTALL)


def key_of_request(pem):
    """SHA-256 of the public key in a PKCS #10 request: information, then its version, subject and key."""
    return hashlib.sha256(parts(parts(der(pem))[0])[2]).hexdigest()


def answer(status, body):
    """What an answer means, with the common names and keys of its certificates."""
    said = json.loads(body)
    kind = KINDS.get(status, "refused")
    if kind != "joined":
        return {"kind": kind, **said}
    found = {name: said[name] for name in ("device", "name", "port")}
    pairs = [certificate(said[one]) for one in ("certificate", "probe_certificate") if one in said]
    return {"kind": kind, **found, "certificates": pairs, "has_secret": bool(said.get("secret"))}


def certificate(pem):
    """Common name, and SHA-256 of the public key: the items of the signed part after its version."""
    _, _, _, _, _, subject, key, *_ = parts(parts(der(pem))[0])
    at = subject.index(COMMON_NAME) + len(COMMON_NAME)
    return [content(subject[at:])[0].decode(), hashlib.sha256(key).hexdigest()]


def der(pem):
    """The bytes of one PEM block."""
    return base64.b64decode("".join(pem.strip().splitlines()[1:-1]))


def content(data):
    """The content of the first DER element, and what follows it."""
    length, at = data[1], 2
    if length > 127:
        at = 2 + length - 128
        length = int.from_bytes(data[2:at], "big")
    return data[at : at + length], data[at + length :]


def parts(data):
    """The elements inside of a DER element, each whole."""
    inside, found = content(data)[0], []
    while inside:
        rest = content(inside)[1]
        found.append(inside[: len(inside) - len(rest)])
        inside = rest
    return found
