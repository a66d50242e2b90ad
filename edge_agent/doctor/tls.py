"""Checks the TLS certificates of broker, device and authority, and how long they are still valid."""

import socket
import ssl
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from fleetune.edge_agent.doctor.check_result import CheckResult, Verdict
from fleetune.edge_agent.joining.certificate import validity_of_broker, validity_of_file
from fleetune.protocols.errors import said_and_remedy
from fleetune.protocols.wire.transport.mqtt import Broker
from fleetune.protocols.wire.transport.tls import (
    CLOCK_BEHIND,
    EXPIRED,
    NOT_YET_VALID,
    broker_context,
    no_phrase,
    refused_certificate,
)

CONNECT_S = 10.0
SOON_DAYS = 30
JOINED_SOON_DAYS = 10  # the coordinator of a joined fleet renews its certificate 30 days before its end
# TLS 1.3: a server refuses a client's certificate only after the handshake, so wait for its answer
_LISTEN_S = 0.5
_OTHER_NAME = (62, 64)  # host name, IP address


def own_certificate(broker: Broker) -> Iterator[CheckResult]:
    """Check that the device's certificate can be read, matches its key, and is valid."""
    what = "own certificate"
    if broker.cert is None:
        if broker.key is not None:
            yield CheckResult("fail", what, "--key is given without --cert", "give both options, or neither")
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(broker.cert, broker.key, password=no_phrase)
    except ssl.SSLError as problem:
        key = broker.key or broker.cert
        if problem.reason == "KEY_VALUES_MISMATCH":
            remedy = "use the key that the certificate was made with"
            yield CheckResult("fail", what, f"{broker.cert} does not match {key}", remedy)
            return
        found = f"{broker.cert} with {key}: {problem.reason or 'not readable'}"
        yield CheckResult("fail", what, found, "give two PEM files, the key without a pass phrase")
        return
    except OSError as problem:
        remedy = "check the paths, and let the agent's user read both files"
        yield CheckResult("fail", what, f"{broker.cert}, {broker.key}: {problem.strerror}", remedy)
        return
    remedy = "get a new one from its authority"
    if broker.joined:  # it renews itself when a third of its life is left
        remedy = "start the agent to renew it; if it has expired, join again: edge-agent join LINE"
    yield _dated(what, broker.cert, *validity_of_file(Path(broker.cert)), remedy, joined=broker.joined)


def authority(broker: Broker) -> Iterator[CheckResult]:
    """Check that the file of --ca can be read and that its first certificate is valid."""
    what = "authority"
    if broker.ca is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(broker.ca)
    except (OSError, ValueError) as problem:  # SSLError is a subclass of OSError
        reason = problem.strerror if isinstance(problem, OSError) and problem.strerror else problem
        reason = "it contains no certificate" if isinstance(problem, ssl.SSLError) else reason
        remedy = "give the PEM file of the authority that signed the broker's certificate"
        yield CheckResult("fail", what, f"{broker.ca}: {reason}", remedy)
        return
    remedy = "get the authority's new certificate"
    yield _dated(what, broker.ca, *validity_of_file(Path(broker.ca)), remedy, joined=broker.joined)


def broker_certificate(broker: Broker) -> Iterator[CheckResult]:
    """Check the broker's certificate by a handshake, and whether the broker accepts the device's."""
    what = "broker's certificate"
    try:
        with _handshake(broker, _context(broker)) as line:
            der = line.getpeercert(binary_form=True) or b""
            rejection = _rejection_after(line, broker)
    except ssl.SSLCertVerificationError as problem:
        if broker.joined and problem.verify_code == NOT_YET_VALID:
            yield CheckResult("warn", what, *said_and_remedy(CLOCK_BEHIND))
            return
        yield CheckResult("fail", what, *_explained(broker, problem))
        return
    except ssl.SSLError as problem:
        found = f"the TLS handshake with {broker} fails ({problem.reason or problem})"
        remedy = "check that this is the broker's TLS port, or connect without TLS: mqtt://host:port"
        yield CheckResult("fail", what, found, remedy)
        return
    except OSError as problem:
        found = f"{broker} ends the connection during the TLS handshake: {problem}"
        yield CheckResult("fail", what, found, "check that this port uses TLS (else use mqtt://)")
        return
    soon_days = JOINED_SOON_DAYS if broker.joined else SOON_DAYS
    yield _dated(what, broker.host, *validity_of_broker(der), "renew it on the broker", soon_days=soon_days)
    if rejection is not None:
        yield rejection


def _dated(
    what: str,
    name: str,
    first: datetime,
    last: datetime,
    remedy: str,
    *,
    joined: bool = False,
    soon_days: int = SOON_DAYS,
) -> CheckResult:
    now = datetime.now(UTC)
    days = (last - now).days
    if now < first:
        found = f"{name}: valid from {first:%Y-%m-%d}, but this device's clock is at {now:%Y-%m-%d}"
        verdict: Verdict = (
            "warn" if joined else "fail"
        )  # a joined device connects with a clock that is behind
        return CheckResult(verdict, what, found, "set this device's clock if it is wrong")
    if now >= last:
        found = f"{name}: expired {(now - last).days} days ago ({last:%Y-%m-%d})"
        return CheckResult("fail", what, found, remedy)
    found = f"{name}: valid for {days} more days (until {last:%Y-%m-%d})"
    return CheckResult("warn", what, found, remedy) if days < soon_days else CheckResult("ok", what, found)


def _context(broker: Broker) -> ssl.SSLContext:
    return broker_context(broker.ca, broker.cert, broker.key, joined=broker.joined)


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


def _rejection_after(line: ssl.SSLSocket, broker: Broker) -> CheckResult | None:
    """Return the result if the broker rejects the certificate after the handshake; None if it does not."""
    line.settimeout(_LISTEN_S)
    try:
        line.recv(1)
    except ssl.SSLError as problem:
        alert = str(problem.reason)
        if broker.joined and (line_of := refused_certificate(alert, str(broker), joined=True)) is not None:
            found, remedy = said_and_remedy(line_of)
        elif "CERTIFICATE_REQUIRED" in alert or "HANDSHAKE_FAILURE" in alert:
            found, remedy = "the broker requires one", "give this device's --cert and --key"
        else:
            found = f"the broker does not accept it ({problem.reason or problem})"
            remedy = "use a certificate that is signed by an authority that the broker trusts"
        return CheckResult("fail", "own certificate", found, remedy)
    except OSError:  # usually a timeout, as the broker sends nothing
        return None
    return None


def _explained(broker: Broker, problem: ssl.SSLCertVerificationError) -> tuple[str, str]:
    """What is wrong with the broker's certificate, and the remedy."""
    if problem.verify_code in _OTHER_NAME:
        names = ", ".join(_names(broker)) or "none"
        return f"it is not valid for {broker.host}, only for {names}", "use one of its names in --broker"
    if broker.joined and problem.verify_code not in (NOT_YET_VALID, EXPIRED):
        found = f"{broker} is not the broker of the fleet that this device has joined"
        return f"{found} ({problem.verify_message})", "check the network, or join again: edge-agent join LINE"
    first, last = _dates_untrusted(broker)
    now = datetime.fromtimestamp(time.time(), UTC)
    if problem.verify_code == NOT_YET_VALID:
        found = f"not valid before {first:%Y-%m-%d %H:%M}, but this device's clock says {now:%Y-%m-%d %H:%M}"
        return found, "set this device's clock"
    if problem.verify_code == EXPIRED:
        if now < last:
            return (
                "an authority in its chain has expired",
                "renew the authority's certificate on the broker and in --ca",
            )
        found = f"expired {(now - last).days} days ago ({last:%Y-%m-%d})"
        return found, "renew it on the broker, or set this device's clock if that is wrong"
    by = f"the authority of {broker.ca}" if broker.ca else "an authority that this system knows"
    found = f"not signed by {by} ({problem.verify_message})"
    return found, "give the PEM file of the authority that signed it: --ca"


def _names(broker: Broker) -> list[str]:
    """Names in the broker's certificate, whose chain is valid."""
    context = _context(broker)
    context.check_hostname = False
    with _handshake(broker, context) as line:
        found = line.getpeercert() or {}
    names: object = found.get("subjectAltName", ())
    return [str(value) for _, value in names] if isinstance(names, tuple) else []


def _dates_untrusted(broker: Broker) -> tuple[datetime, datetime]:
    """Dates between which the broker's certificate is valid, even if it is not trusted."""
    context = _context(broker)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with _handshake(broker, context) as line:
        return validity_of_broker(line.getpeercert(binary_form=True) or b"")
