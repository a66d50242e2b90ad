"""Checks TLS with the broker: its certificate, the device's own, and the authority's, with their remaining
days.
"""

import socket
import ssl
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from fleetune.edge_agent.doctor.certificate import validity, validity_of_file
from fleetune.edge_agent.doctor.check_result import CheckResult
from fleetune.protocols.wire.transport.mqtt import Broker

CONNECT_S = 10.0
SOON_DAYS = 30
# TLS 1.3: a server refuses a client's certificate only after the handshake, so wait for its answer
_LISTEN_S = 0.5
_NOT_YET, _EXPIRED = 9, 10  # X509_V_ERR_* of openssl's x509_vfy.h
_OTHER_NAME = (62, 64)  # host name, IP address


def own_certificate(broker: Broker) -> Iterator[CheckResult]:
    """Check the device's certificate: it can be read, matches its key, and is valid."""
    what = "own certificate"
    if broker.cert is None:
        if broker.key is not None:
            yield CheckResult("fail", what, "there is a --key but no --cert", "give both, or neither")
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(broker.cert, broker.key, password=_no_phrase)
    except ssl.SSLError as problem:
        key = broker.key or broker.cert
        if problem.reason == "KEY_VALUES_MISMATCH":
            remedy = "use the key that the certificate was made with"
            yield CheckResult("fail", what, f"{broker.cert} does not match {key}", remedy)
            return
        found = f"{broker.cert} with {key}: {problem.reason or 'not readable'}"
        yield CheckResult("fail", what, found, "both must be PEM files, and the key without a pass phrase")
        return
    except OSError as problem:
        remedy = "check the path, and that the agent's user may read both files"
        yield CheckResult("fail", what, f"{broker.cert}, {broker.key}: {problem.strerror}", remedy)
        return
    yield _dated(what, broker.cert, *validity_of_file(Path(broker.cert)), "have it renewed")


def authority(broker: Broker) -> Iterator[CheckResult]:
    """Check the file of --ca: it can be read, and no certificate in it has expired."""
    what = "authority"
    if broker.ca is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(broker.ca)
    except (OSError, ValueError) as problem:  # SSLError is a subclass of OSError
        reason = problem.strerror if isinstance(problem, OSError) and problem.strerror else problem
        reason = "no certificate in it" if isinstance(problem, ssl.SSLError) else reason
        remedy = "give the PEM file of the authority that signed the broker's certificate"
        yield CheckResult("fail", what, f"{broker.ca}: {reason}", remedy)
        return
    yield _dated(what, broker.ca, *validity_of_file(Path(broker.ca)), "fetch the authority's new certificate")


def broker_certificate(broker: Broker) -> Iterator[CheckResult]:
    """Check the broker's certificate in a handshake: chain, name and dates. Report a demand for our
    certificate.
    """
    what = "broker's certificate"
    try:
        with _handshake(broker, _context(broker)) as line:
            der = line.getpeercert(binary_form=True) or b""
            objection = _objection_after(line)
    except ssl.SSLCertVerificationError as problem:
        yield CheckResult("fail", what, *_explained(broker, problem))
        return
    except ssl.SSLError as problem:
        found = f"no TLS handshake with {broker} ({problem.reason or problem})"
        yield CheckResult(
            "fail",
            what,
            found,
            "check that this is the broker's TLS port. Without TLS use mqtt:// or host:port",
        )
        return
    except OSError as problem:
        yield CheckResult(
            "fail", what, f"the handshake with {broker} was cut off: {problem}", "look at the broker's log"
        )
        return
    yield _dated(what, broker.host, *validity(der), "renew it on the broker")
    if objection is not None:
        yield objection


def _dated(what: str, name: str, first: datetime, last: datetime, remedy: str) -> CheckResult:
    now = datetime.now(UTC)
    days = (last - now).days
    if now < first:
        found = f"{name}: valid from {first:%Y-%m-%d}, but the clock says {now:%Y-%m-%d}"
        return CheckResult("fail", what, found, "set the clock if it is wrong")
    if now >= last:
        return CheckResult(
            "fail", what, f"{name}: expired {(now - last).days} days ago ({last:%Y-%m-%d})", remedy
        )
    found = f"{name}: valid for {days} more days (until {last:%Y-%m-%d})"
    return CheckResult("warn", what, found, remedy) if days < SOON_DAYS else CheckResult("ok", what, found)


def _context(broker: Broker) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=broker.ca)
    if broker.cert is not None:
        context.load_cert_chain(broker.cert, broker.key, password=_no_phrase)
    return context


def _no_phrase() -> str:
    """An empty pass phrase, because an agent runs without a person to enter one."""
    return ""


def _handshake(broker: Broker, context: ssl.SSLContext) -> ssl.SSLSocket:
    """Connect and do the handshake.

    Raises:
        OSError: it fails. SSLError is a subclass.
    """
    line = socket.create_connection((broker.host, broker.port), CONNECT_S)
    try:
        return context.wrap_socket(line, server_hostname=broker.host)
    except BaseException:
        line.close()
        raise


def _objection_after(line: ssl.SSLSocket) -> CheckResult | None:
    """The broker's objection to this device's identity after the handshake. None: it sends nothing."""
    line.settimeout(_LISTEN_S)
    try:
        line.recv(1)
    except ssl.SSLError as problem:
        if "CERTIFICATE_REQUIRED" in str(problem.reason) or "HANDSHAKE_FAILURE" in str(problem.reason):
            return CheckResult(
                "fail", "own certificate", "the broker requires one", "give this device's --cert and --key"
            )
        found = f"the broker does not accept it ({problem.reason or problem})"
        return CheckResult(
            "fail", "own certificate", found, "have it signed by an authority that the broker trusts"
        )
    except OSError:  # usually a timeout, as the broker sends nothing
        return None
    return None


def _explained(broker: Broker, problem: ssl.SSLCertVerificationError) -> tuple[str, str]:
    """Fault of the broker's certificate, and the remedy."""
    if problem.verify_code in _OTHER_NAME:
        names = ", ".join(_names(broker)) or "none"
        return f"{broker.host} is not one of its names ({names})", "use one of these names in --broker"
    first, last = _dates_untrusted(broker)
    now = datetime.fromtimestamp(time.time(), UTC)
    if problem.verify_code == _NOT_YET:
        found = f"not valid before {first:%Y-%m-%d %H:%M}, but the clock says {now:%Y-%m-%d %H:%M} UTC"
        return found, "set the clock"
    if problem.verify_code == _EXPIRED:
        if now < last:
            return "an authority in its chain has expired", "renew the chain on both sides"
        found = f"expired {(now - last).days} days ago ({last:%Y-%m-%d})"
        return found, "renew it on the broker, or set this device's clock if that is wrong"
    by = f"the authority of {broker.ca}" if broker.ca else "an authority that this system knows"
    return (
        f"not signed by {by} ({problem.verify_message})",
        "give the PEM file of the authority that signed it: --ca",
    )


def _names(broker: Broker) -> list[str]:
    """Names in the broker's certificate, which is trusted except for its name."""
    context = _context(broker)
    context.check_hostname = False
    with _handshake(broker, context) as line:
        found = line.getpeercert() or {}
    names: object = found.get("subjectAltName", ())
    return [str(value) for _, value in names] if isinstance(names, tuple) else []


def _dates_untrusted(broker: Broker) -> tuple[datetime, datetime]:
    """From when until when the broker's certificate is valid, trusted or not."""
    context = _context(broker)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with _handshake(broker, context) as line:
        return validity(line.getpeercert(binary_form=True) or b"")
