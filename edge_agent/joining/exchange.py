"""The device's side of the exchange by which it joins a fleet, see `protocols.wire.join_exchange`."""

import http.client
import socket
import ssl
from contextlib import closing

import msgspec

from fleetune.protocols.errors import TransportError
from fleetune.protocols.one_line import flat
from fleetune.protocols.wire.join_exchange import (
    AUTHORITY_PATH,
    JOIN_PATH,
    MAX_JOIN_BYTES,
    Joined,
    JoinLine,
    JoinPending,
    JoinRefused,
    JoinRequest,
    fingerprint_of,
)
from fleetune.protocols.wire.transport.mqtt import in_url, unanswered
from fleetune.protocols.wire.transport.tls import NOT_YET_VALID, fleet_context, pem_certificates

CONNECT_S = 15.0
BUSY = (429, 503)  # the server has too many requests

Answer = Joined | JoinPending | JoinRefused


class ServerBusyError(TransportError):
    """The server has too many requests now."""


def authority_of(line: JoinLine) -> str:
    """Return the certificate with the invitation's fingerprint, in PEM, as the server sends it.

    The server is not known yet, so the request holds nothing about the device.

    Raises:
        TransportError: the server does not answer, or has another authority.
    """
    unknown = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    unknown.check_hostname, unknown.verify_mode = False, ssl.CERT_NONE
    status, data = _ask(line, unknown, "GET", AUTHORITY_PATH)
    if status in BUSY:
        raise ServerBusyError(f"{_place(line)} has too many requests; try again in a minute")
    for one in pem_certificates(data.decode("ascii", errors="replace")):
        try:
            if fingerprint_of(ssl.PEM_cert_to_DER_cert(one)) == line.fingerprint:
                return one
        except ValueError:
            continue
    raise TransportError(
        f"{_place(line)} is not the coordinator of this invitation: its authority has another fingerprint;"
        " nothing was sent. Ask for a new invitation, and check the network"
    )


def send(line: JoinLine, authority: str, request: JoinRequest) -> tuple[Answer, bool]:
    """Send a request to a server that the authority has signed.

    Returns:
        The answer, and True if this device's clock is right as far as the server's certificate shows.

    Raises:
        ServerBusyError: the server has too many requests.
        TransportError: the server does not answer, or is not the coordinator.
    """
    try:
        return _send(line, fleet_context(authority), request), True
    except ssl.SSLCertVerificationError as problem:
        if problem.verify_code != NOT_YET_VALID:
            raise TransportError(
                f"{_place(line)} is not the coordinator of this invitation ({problem.verify_message});"
                " nothing was sent. Check this device's clock and the network"
            ) from None
    # The authority has signed a later date than this clock shows, so the clock is behind.
    return _send(line, fleet_context(authority, check_dates=False), request), False


def _send(line: JoinLine, context: ssl.SSLContext, request: JoinRequest) -> Answer:
    status, data = _ask(line, context, "POST", JOIN_PATH, msgspec.json.encode(request))
    if status in BUSY:
        raise ServerBusyError(f"{_place(line)} has too many requests; try again in a minute")
    kind: type[Answer] = {200: Joined, 202: JoinPending}.get(status, JoinRefused)  # type: ignore[assignment]
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError:
        raise TransportError(
            f"{_place(line)} gives an answer that this program does not read (status {status});"
            " install the same version of fleetune on both sides"
        ) from None


def _ask(
    line: JoinLine, context: ssl.SSLContext, method: str, path: str, body: bytes | None = None
) -> tuple[int, bytes]:
    """Send one request, and return the answer's status and its body, which may have been cut.

    Raises:
        ssl.SSLCertVerificationError: the server's certificate is not valid.
        TransportError: the server cannot be reached, or its answer is no answer.
    """
    try:
        with closing(
            http.client.HTTPSConnection(line.host, line.port, timeout=CONNECT_S, context=context)
        ) as connection:
            headers = {} if body is None else {"Content-Type": "application/json"}
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read(MAX_JOIN_BYTES)
    except ssl.SSLCertVerificationError:
        raise
    except (OSError, http.client.HTTPException) as problem:
        raise TransportError(f"{_place(line)}: {_words(problem)}") from None


def _words(problem: Exception) -> str:
    match problem:
        case socket.gaierror():
            return "the host is unknown; check the name and the network"
        case ConnectionRefusedError():
            return "no program listens there; is the coordinator running?"
        case ssl.SSLError() if "CERTIFICATE_REQUIRED" in (problem.reason or ""):
            return "this is not the port for joining; use the line that edge-coordinator invite prints"
        case ssl.SSLError():
            return f"TLS failed ({problem.reason}); is this the line that edge-coordinator invite prints?"
        case TimeoutError() | OSError(strerror=str()):
            return f"{unanswered(problem)}; check address, network and firewall, and run this again"
        case _:
            return f"{flat(problem) or 'the connection ended'}; run the same command again"


def _place(line: JoinLine) -> str:
    return f"{in_url(line.host)}:{line.port}"
