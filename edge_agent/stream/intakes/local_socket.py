"""Intake by a Unix socket, for programs in any language; `messages` describes the messages.

Each message gets an answer once its sample is on disk. Only processes of the agent's user may connect (mode
0600). Message size, unread answers and bad messages are limited. A program that does not read its answers is
not read either. No program can block the agent.
"""

import errno
import logging
import os
import selectors
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from fleetune.edge_agent.stream.intakes.messages import (
    ParsedMessage,
    answer_to,
    first_message,
    read_message,
    store_messages,
)
from fleetune.edge_agent.stream.sample import BadSample
from fleetune.edge_agent.stream.sample_store import Outcome, SampleStore
from fleetune.protocols.errors import SettingError, StoreError

MAX_CONNECTIONS = 16
MAX_ANSWER_BYTES = 2**16  # unread answers of one connection
MAX_BAD_MESSAGES, BAD_MESSAGES_S = 100, 60.0  # so many in so many seconds close a connection
READ_BYTES = 2**18
MESSAGES_AT_ONCE = 256  # messages of one connection before others are served
POLL_S = 0.5

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Peer:
    """One connection."""

    socket: socket.socket
    received: bytearray = field(default_factory=bytearray)
    answers: bytearray = field(default_factory=bytearray)
    bad_at: list[float] = field(default_factory=list)
    ended: bool = False


class SocketIntake:
    """Listens on a Unix socket from construction on.

    Args:
        store: the device's store.
        path: path of the socket.
        clock: monotonic clock, in seconds.

    Raises:
        SettingError: the path cannot be used, or another program listens there.
    """

    def __init__(
        self, store: SampleStore, path: Path, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self.path, self._clock = store, path, clock
        self._listening = _listen(path)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ, None)
        self._peers: set[_Peer] = set()

    def run(self, stopped: threading.Event) -> None:
        """Serve connections until `stopped` is set, then remove the socket."""
        try:
            while not stopped.is_set():
                for key, events in self._selector.select(POLL_S):
                    if key.data is None:
                        self._accept()
                    else:
                        self._serve(key.data, events)
        finally:
            for peer in [*self._peers]:
                self._drop(peer)
            self._selector.close()
            self._listening.close()
            with suppress(OSError):
                self.path.unlink()

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except OSError:
            return  # the peer has gone again, or there is no free file handle
        if len(self._peers) >= MAX_CONNECTIONS:
            self._store.refuse(
                BadSample("message", f"more than {MAX_CONNECTIONS} connections at once; the newest is closed")
            )
            connection.close()
            return
        connection.setblocking(False)
        peer = _Peer(connection)
        self._peers.add(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _serve(self, peer: _Peer, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                self._receive(peer)
            self._answer(peer, self._next_messages(peer))
            self._flush(peer)
        except (OSError, BadSample) as problem:
            if isinstance(problem, BadSample):
                self._store.refuse(problem)
            self._drop(peer)

    def _receive(self, peer: _Peer) -> None:
        with suppress(BlockingIOError):
            data = peer.socket.recv(READ_BYTES)
            peer.received += data
            peer.ended = not data

    def _flush(self, peer: _Peer) -> None:
        with suppress(BlockingIOError):
            while peer.answers:
                del peer.answers[: peer.socket.send(peer.answers)]
        more = first_message(peer.received) is not None
        if peer.ended and not peer.answers and not more:
            self._drop(peer)
            return
        reads = not peer.ended and len(peer.answers) < MAX_ANSWER_BYTES and not more
        events = (selectors.EVENT_READ if reads else 0) | (
            selectors.EVENT_WRITE if peer.answers or more else 0
        )
        self._selector.modify(peer.socket, events or selectors.EVENT_WRITE, peer)

    def _next_messages(self, peer: _Peer) -> list[ParsedMessage]:
        """The next complete messages of a connection.

        Raises:
            BadSample: a message is too long, or there were too many bad messages.
        """
        found: list[ParsedMessage] = []
        while len(found) < MESSAGES_AT_ONCE and len(peer.answers) < MAX_ANSWER_BYTES:
            whole = first_message(peer.received)
            if whole is None:
                break
            start, end, as_json = whole
            content = bytes(peer.received[start:end])
            del peer.received[: end + as_json]
            if content.strip() or not as_json:
                found.append(read_message(content, as_json=as_json))
        now = self._clock()
        bad = [one for one in found if one.problem is not None]
        peer.bad_at = [at for at in peer.bad_at if now - at < BAD_MESSAGES_S] + [now] * len(bad)
        if len(peer.bad_at) > MAX_BAD_MESSAGES:
            for one in bad:
                assert one.problem is not None
                self._store.refuse(one.problem)
            raise BadSample(
                "message", f"a connection with {MAX_BAD_MESSAGES} bad messages in a minute is closed"
            )
        return found

    def _answer(self, peer: _Peer, messages: list[ParsedMessage]) -> None:
        """Store the samples and labels of messages in one transaction, and answer each message."""
        outcomes: list[Outcome | None] = [None] * len(messages)
        failed: StoreError | None = None
        try:
            outcomes = store_messages(self._store, messages)
        except StoreError as problem:
            failed = problem
            self._store.refusals.add("disk", str(problem))
        for one, outcome in zip(messages, outcomes, strict=True):
            if one.problem is not None:
                self._store.refuse(one.problem)
            answer = answer_to(one, outcome, failed)
            data = msgspec.json.encode(answer) if one.as_json else msgspec.msgpack.encode(answer)
            peer.answers += data + b"\n" if one.as_json else len(data).to_bytes(4, "big") + data

    def _drop(self, peer: _Peer) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(peer.socket)
        peer.socket.close()
        self._peers.discard(peer)


def _listen(path: Path) -> socket.socket:
    if sys.platform == "win32":
        raise SettingError("--intake: Windows has no Unix sockets; use --data with another source")
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale_socket(path)
        # renamed once it listens: a program that sees the socket can connect
        draft = path.with_name(f".{path.name}")
        draft.unlink(missing_ok=True)
        # Linux gives the file this mode, so that it is never open to others
        os.fchmod(listening.fileno(), 0o600)
        listening.bind(str(draft))
        draft.chmod(0o600)
        listening.listen(MAX_CONNECTIONS)
        listening.setblocking(False)
        draft.replace(path)
    except OSError as problem:
        listening.close()
        reason = (
            "the path is too long for a socket; choose a shorter one"
            if "too long" in str(problem)
            else problem.strerror or str(problem)
        )
        raise SettingError(f"--intake {path}: {reason}") from None
    return listening


def _remove_stale_socket(path: Path) -> None:
    """Remove the socket that a killed agent left behind.

    Raises:
        OSError: the file is not a socket, or another program listens there.
    """
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise OSError(errno.EEXIST, "a file of that name exists, and it is not a socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise OSError(errno.EADDRINUSE, "another program listens there")
