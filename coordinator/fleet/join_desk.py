"""Answers the requests of the join exchange, and keeps a fleet's files up to date."""

import logging
import ssl
import time

import msgspec

from fleetune.coordinator.fleet.access_files import write_access_files
from fleetune.coordinator.fleet.authority import Authority
from fleetune.coordinator.fleet.fleet_address import FleetAddress, names_of_this_machine
from fleetune.coordinator.fleet.fleet_folder import FleetFolder
from fleetune.coordinator.fleet.join_limits import REFUSED_RATE, Limits
from fleetune.coordinator.fleet.joining import JoinError, join
from fleetune.coordinator.fleet.registry import Registry
from fleetune.coordinator.fleet.rotation import finish_rotation
from fleetune.protocols.files import FileMark, mark_of
from fleetune.protocols.wire.join_exchange import AUTHORITY_PATH, JOIN_PATH, JoinPending, JoinRequest

RENEW_S = 3600.0  # how often the certificates are looked at, unless a file or the clock changes
CLOCK_STEP_S = 60.0

log = logging.getLogger(__name__)
_decoder = msgspec.json.Decoder(JoinRequest)


class HttpError(Exception):
    """A request gets another status than 200.

    Attributes:
        status: status code and words of HTTP.
        cause: the kind of the reason, by which refusals are counted.
        line: what is wrong, and what to do.
    """

    def __init__(self, status: str, cause: str, line: str) -> None:
        super().__init__(line)
        self.status = status
        self.cause = cause
        self.line = line


class Desk:
    """Answers the requests of devices, and keeps the fleet's files up to date.

    Args:
        folder: the fleet's folder.
        limits: what is accepted.
    """

    def __init__(self, folder: FleetFolder, limits: Limits) -> None:
        self.folder = folder
        self.limits = limits
        self.registry = Registry.open(folder.registry)
        self.authority = Authority.open(folder, time.time())
        self._version = -1
        self._renewed_at = -RENEW_S
        self._clock_offset = 0.0
        self._marks: list[FileMark | None] = []
        self._server_mark: object = None
        self._context: ssl.SSLContext | None = None
        self._said: set[str] = set()

    def look(self) -> None:
        """Do what is due: renew certificates, drop an old authority, write files that are missing or damaged.

        Raises StoreError.
        """
        if self._is_renewal_due():
            hosts = [*FleetAddress.read(self.folder).hosts, *names_of_this_machine()]
            self.authority.rotate_before_end(time.time())
            self.authority.renew_server(hosts, time.time())
            self._renewed_at, self._version = self.limits.clock(), -1  # certificates have ended meanwhile
            self._clock_offset = time.time() - self.limits.clock()
        if (version := self.registry.version) != self._version:
            finish_rotation(self.authority, self.registry, time.time())
            write_access_files(self.authority, self.registry, time.time())
            self._version, self._marks = version, self._present_marks()

    def _is_renewal_due(self) -> bool:
        """True if time is over, the clock was set, or another process has changed or removed a file."""
        return (
            self.limits.clock() - self._renewed_at >= RENEW_S
            or abs(time.time() - self.limits.clock() - self._clock_offset) > CLOCK_STEP_S
            or self._marks != self._present_marks()
        )

    def _present_marks(self) -> list[FileMark | None]:
        folder = self.folder
        files = folder.authority, folder.server, folder.server_key, folder.revoked, folder.passwords
        return [mark_of(one) for one in files]

    @property
    def context(self) -> ssl.SSLContext:
        """The TLS settings, with the present certificate. Raises OSError."""
        mark = mark_of(self.folder.server)
        if self._context is None or mark != self._server_mark:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.load_cert_chain(self.folder.server, self.folder.server_key)
            self._context, self._server_mark = context, mark
        return self._context

    def answer(self, method: str, path: str, body: bytes, address: str) -> tuple[str, str, bytes]:
        """Return status, content type and body of an answer. Raises HttpError."""
        if path == AUTHORITY_PATH:
            _check_method(method, "GET")
            return "200 OK", "application/x-pem-file", self.authority.bundle.encode()
        if path != JOIN_PATH:
            raise HttpError("404 Not Found", "path", f"there is only {AUTHORITY_PATH} and {JOIN_PATH}")
        _check_method(method, "POST")
        if not self.limits.take(address):
            line = f"too many requests from this address were refused; wait {1 / REFUSED_RATE:.0f} s"
            raise HttpError("429 Too Many Requests", "rate", line)
        try:
            request = _decoder.decode(body)
        except (msgspec.MsgspecError, RecursionError):
            # the decoder's words may quote the body
            raise HttpError(
                "400 Bad Request", "json", "the body is no JoinRequest; see docs/wire.md"
            ) from None
        try:
            made = join(self.registry, self.authority, FleetAddress.read(self.folder), request, time.time())
        except JoinError as problem:
            raise HttpError("403 Forbidden", problem.cause, str(problem)) from None
        self.limits.give_back(address)
        if isinstance(made, JoinPending):
            self._say(
                f"{made.device} waits for approval; edge-coordinator approve {made.device} lets it join"
            )
            return "202 Accepted", "application/json", msgspec.json.encode(made)
        self._say(f"{made.device} has joined from {address}")
        return "200 OK", "application/json", msgspec.json.encode(made)

    def _say(self, line: str) -> None:
        """Log a line once, because a device may repeat its request."""
        if line not in self._said:
            self._said.add(line)
            log.info("%s", line)


def _check_method(method: str, wanted: str) -> None:
    if method != wanted:
        raise HttpError("405 Method Not Allowed", "method", f"use {wanted}")
