"""The process that serves the join exchange (`protocols.wire.join_exchange`) over HTTPS.

It is the part of a fleet that anybody on the network can reach without an identity, so everything is bounded:
connections, bytes, seconds, and requests a second, for each address and in all. One thread does all the work,
at a low priority. It also keeps the files of the fleet up to date: it renews the server's certificate, and
writes the access files when the registry has changed.

    python -m fleetune.coordinator.fleet.join_service FOLDER BIND PORT
"""

import asyncio
import logging
import os
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fleetune.coordinator.fleet.fleet_folder import FleetFolder
from fleetune.coordinator.fleet.join_desk import Desk, HttpError
from fleetune.coordinator.fleet.join_limits import Limits, RefusalLog, network_of
from fleetune.coordinator.fleet.join_server import READY
from fleetune.protocols.errors import FleetuneError, TransportError
from fleetune.protocols.one_line import unexpected
from fleetune.protocols.wire.join_exchange import MAX_JOIN_BYTES, JoinRefused

EXCHANGE_S, HANDSHAKE_S = 10.0, 5.0  # of one connection
MAX_HEAD_BYTES = 8192
LOOK_S = 1.0  # how often the registry is looked at
NICENESS = 10

log = logging.getLogger(__name__)


async def _request(reader: asyncio.StreamReader) -> tuple[str, str, bytes]:
    """Read a request, and return method, path and body. Raises HttpError, EOFError or OSError."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.LimitOverrunError:
        raise HttpError("431 Request Header Fields Too Large", "head", "the header is too long") from None
    first, *lines = head.split("\r\n")
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (one.partition(":") for one in lines)
    }
    match first.split(" "):
        case [method, path, "HTTP/1.1" | "HTTP/1.0"]:
            pass
        case _:
            raise HttpError("400 Bad Request", "head", "this is no HTTP/1.1 request")
    if "transfer-encoding" in headers:
        raise HttpError("411 Length Required", "head", "send a Content-Length")
    length = headers.get("content-length", "0")
    if not (length.isascii() and length.isdigit()):
        raise HttpError("400 Bad Request", "head", "the Content-Length is no number")
    if len(length) > 6 or int(length) > MAX_JOIN_BYTES:
        raise HttpError(
            "413 Content Too Large", "large", f"the body is too long; at most {MAX_JOIN_BYTES} bytes"
        )
    return method, path, await reader.readexactly(int(length))


@dataclass
class Service:
    """Serves the join exchange on one socket.

    Attributes:
        desk: it answers the requests.
        limits: how many connections are accepted.
        refusals: the log of refused requests.
    """

    desk: Desk
    limits: Limits
    refusals: RefusalLog

    async def run(self, listener: socket.socket) -> None:
        """Accept connections, each in a task of its own, and look after the fleet's files."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._look())
            while True:
                try:
                    connection, (host, *_) = await asyncio.get_running_loop().sock_accept(listener)
                except OSError:  # the connection is gone, or too many files are open
                    await asyncio.sleep(0.05)
                    continue
                address = network_of(host)
                if self.limits.admits(address):
                    self._make_room(address)
                    task = group.create_task(self._serve(connection, address))
                    self.limits.open[task] = address
                    task.add_done_callback(lambda ended: self.limits.open.pop(ended, None))
                else:
                    connection.close()
                    self.refusals.say("rate", address, "too many connections; some are closed unread")

    def _make_room(self, address: str) -> None:
        task = self.limits.in_the_way(address)
        if isinstance(task, asyncio.Task):
            del self.limits.open[task]  # not only when it has ended
            task.cancel()
            self.refusals.say("room", address, "many connections are open; the oldest are closed")

    async def _look(self) -> None:
        while True:
            try:
                self.desk.look()
            except FleetuneError as problem:
                self.refusals.say("files", "this machine", str(problem))
            await asyncio.sleep(LOOK_S)

    async def _serve(self, connection: socket.socket, address: str) -> None:
        """Answer the one request of a connection."""
        try:
            async with asyncio.timeout(EXCHANGE_S):
                await self._exchange(connection, address)
        except (OSError, EOFError, TimeoutError):  # also ssl.SSLError; a peer without TLS, slow, or gone
            log.debug("no request from %s", address, exc_info=True)
        except Exception as fault:
            self.refusals.say("fault", address, unexpected(fault))
            log.debug("traceback", exc_info=True)

    async def _exchange(self, connection: socket.socket, address: str) -> None:
        try:
            context = self.desk.context
        except OSError:
            connection.close()
            raise
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=MAX_HEAD_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, connection, ssl=context, ssl_handshake_timeout=HANDSHAKE_S
        )
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        try:
            writer.write(await self._answer(reader, address))
            writer.close()
            await writer.wait_closed()
        finally:
            transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, address: str) -> bytes:
        try:
            return _encoded(*self.desk.answer(*await _request(reader), address))
        except HttpError as problem:
            self.refusals.say(problem.cause, address, problem.line)
            status, line = problem.status, problem.line
        except FleetuneError as problem:
            self.refusals.say("files", address, str(problem))
            status = "503 Service Unavailable"
            line = "the coordinator cannot use its files, and its log says why; try again later"
        return _encoded(status, "application/json", msgspec.json.encode(JoinRefused(line)))


def _encoded(status: str, kind: str, body: bytes) -> bytes:
    """Return an answer of HTTP."""
    headers = f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close"
    return f"HTTP/1.1 {status}\r\n{headers}\r\n\r\n".encode() + body


def _listener(bind: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    both = bind == "::" and socket.has_dualstack_ipv6()
    try:
        made = socket.create_server((bind, port), family=family, dualstack_ipv6=both, backlog=128)
    except OSError as problem:
        why = str(problem.strerror).partition(" (")[0]
        raise TransportError(
            f"the join server cannot listen on port {port} of {bind}: {why}; stop the program that uses the"
            " port, or choose another --port"
        ) from None
    made.setblocking(False)
    return made


def main(folder: str, bind: str, port: str) -> None:
    """Serve until this process is ended."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    with suppress(OSError):
        os.nice(NICENESS)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        listener = _listener(bind, int(port))
        limits = Limits()
        service = Service(Desk(FleetFolder(Path(folder)), limits), limits, RefusalLog(limits.clock))
        service.desk.look()
    except FleetuneError as problem:
        print(problem, flush=True)  # `start_join_server` raises it
        raise SystemExit(2) from None
    print(READY, listener.getsockname()[1], flush=True)
    asyncio.run(service.run(listener))


if __name__ == "__main__":
    main(*sys.argv[1:])
