"""A Unix socket for sensors' programs in whatever language, see `intake_messages`: an answer to each message,
once what it brought is durable.

Only the owner's own processes may connect (mode 0600). What one of them may take is bounded: message, answers
that wait, rubbish; who does not read is not read either. Nobody here can hold up the agent.
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
)
from fleetune.edge_agent.stream.sample import BadSample
from fleetune.edge_agent.stream.sample_store import Outcome, SampleStore
from fleetune.protocols.errors import SettingError, StoreError

MAX_CONNECTIONS = 16
MAX_WAITING_BYTES = 2**16  # of answers that are not read
MAX_RUBBISH, RUBBISH_S = 100, 60.0  # messages that are refused, in so many seconds: then one is cut off
READ_BYTES = 2**18
TURN_MESSAGES = 256  # of one connection, then it is another's turn
LOOK_S = 0.5

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Peer:
    """One connection."""

    socket: socket.socket
    received: bytearray = field(default_factory=bytearray)
    waiting: bytearray = field(default_factory=bytearray)
    rubbish: list[float] = field(default_factory=list)
    ended: bool = False


class SocketIntake:
    """Listens as soon as it is made.

    Args:
        store: of the device.
        path: of the socket.
        clock: seconds that never jump.

    Raises:
        SettingError: the path cannot be listened on, or somebody else does.
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
        """Until told to stop; then nothing listens there."""
        try:
            while not stopped.is_set():
                for key, events in self._selector.select(LOOK_S):
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
            return  # gone again, or no file handles are left
        if len(self._peers) >= MAX_CONNECTIONS:
            self._store.refuse(BadSample("message", f"more than {MAX_CONNECTIONS} connections at once"))
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
            while peer.waiting:
                del peer.waiting[: peer.socket.send(peer.waiting)]
        more = first_message(peer.received) is not None
        if peer.ended and not peer.waiting and not more:
            self._drop(peer)
            return
        reads = not peer.ended and len(peer.waiting) < MAX_WAITING_BYTES and not more
        wanted = (selectors.EVENT_READ if reads else 0) | (
            selectors.EVENT_WRITE if peer.waiting or more else 0
        )
        self._selector.modify(peer.socket, wanted or selectors.EVENT_WRITE, peer)

    def _next_messages(self, peer: _Peer) -> list[ParsedMessage]:
        """Those that are here in whole.

        Raises:
            BadSample: there is too much of it, or too much rubbish.
        """
        found: list[ParsedMessage] = []
        while len(found) < TURN_MESSAGES and len(peer.waiting) < MAX_WAITING_BYTES:
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
        peer.rubbish = [at for at in peer.rubbish if now - at < RUBBISH_S] + [now] * len(bad)
        if len(peer.rubbish) > MAX_RUBBISH:
            for one in bad:
                assert one.problem is not None
                self._store.refuse(one.problem)
            raise BadSample("message", f"a connection with {MAX_RUBBISH} bad messages in a minute is closed")
        return found

    def _answer(self, peer: _Peer, messages: list[ParsedMessage]) -> None:
        """Keep what is good in as few transactions as its order allows, and answer all of it."""
        samples = [one for one in messages if one.sample is not None]
        labels = [one for one in messages if one.label is not None]
        outcomes: dict[int, Outcome] = {}
        failed: StoreError | None = None
        try:
            if samples:
                kept = self._store.add([one.sample for one in samples if one.sample is not None])
                outcomes |= {id(one): outcome for one, outcome in zip(samples, kept, strict=True)}
            if labels:
                given = [(str(one.id), one.label) for one in labels if one.label is not None]
                outcomes |= {
                    id(one): outcome for one, outcome in zip(labels, self._store.label(given), strict=True)
                }
        except StoreError as problem:
            failed = problem
            self._store.refusals.add("disk", str(problem))
        for one in messages:
            if one.problem is not None:
                self._store.refuse(one.problem)
            answer = answer_to(one, outcomes.get(id(one)), failed)
            data = msgspec.json.encode(answer) if one.as_json else msgspec.msgpack.encode(answer)
            peer.waiting += data + b"\n" if one.as_json else len(data).to_bytes(4, "big") + data

    def _drop(self, peer: _Peer) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(peer.socket)
        peer.socket.close()
        self._peers.discard(peer)


def _listen(path: Path) -> socket.socket:
    if sys.platform == "win32":
        raise SettingError("--intake: there are no Unix sockets here")
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _make_way(path)
        hidden = path.with_name(f".{path.name}")  # who sees the socket finds somebody that listens
        hidden.unlink(missing_ok=True)
        os.fchmod(listening.fileno(), 0o600)  # Linux gives the file the socket's mode: never open to all
        listening.bind(str(hidden))
        hidden.chmod(0o600)
        listening.listen(MAX_CONNECTIONS)
        listening.setblocking(False)
        hidden.replace(path)
    except OSError as problem:
        listening.close()
        reason = "its path is too long" if "too long" in str(problem) else problem.strerror or str(problem)
        raise SettingError(f"--intake {path}: {reason}") from None
    return listening


def _make_way(path: Path) -> None:
    """Remove the socket of an agent that was killed. Raises OSError: it is no such thing."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise OSError(errno.EEXIST, "there is a file of that name, which is no socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise OSError(errno.EADDRINUSE, "another program listens there")
