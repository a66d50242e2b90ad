"""A connection of its own between this machine and a worker on a node, for all that a round takes there.

Ray takes an argument or a result of more than 100 kB through the object stores of both nodes: 2 to 3 ms of
the processor each way, whatever its size, which is as long as a small network trains. Who works where, and
who has died, stays with Ray. Whoever connects shows a key that went through Ray; before that nothing of
theirs is unpickled.
"""

import hmac
import pickle
import secrets
import socket
import struct
import time
from contextlib import suppress
from typing import Any

import numpy as np

_KEY_BYTES = 32
_TO_CONNECT_S = 5.0
_STALLED_S = 60.0  # in the midst of a message: the node is gone
_LENGTH = struct.Struct(">Q")


class ChannelError(Exception):
    """The connection broke, or was never made."""


class DirectChannel:
    """Messages both ways, any objects that `pickle` knows; arrays go as they lie in memory.

    Args:
        connection: that is made and known to be with the right one.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(_STALLED_S)
        self._connection = connection

    def send(self, message: Any) -> None:
        """Raises ChannelError."""
        arrays: list[pickle.PickleBuffer] = []
        pickled = pickle.dumps(message, protocol=5, buffer_callback=arrays.append)
        parts = [memoryview(pickled), *(array.raw() for array in arrays)]
        lengths = [len(parts), *(part.nbytes for part in parts)]
        try:
            for part in (memoryview(b"".join(map(_LENGTH.pack, lengths))), *parts):
                num_sent = 0
                while num_sent < part.nbytes:  # each piece in its own time: `sendall` has one for all of it
                    num_sent += self._connection.send(part[num_sent:])
        except OSError as problem:
            raise ChannelError(str(problem)) from None

    def poll(self, patience_s: float) -> bool:
        """Whether a message begins to come within that time. Raises ChannelError."""
        self._connection.settimeout(patience_s)
        try:
            if not self._connection.recv(1, socket.MSG_PEEK):
                raise ChannelError("it was closed")
        except TimeoutError:
            return False
        except OSError as problem:
            raise ChannelError(str(problem)) from None
        finally:
            self._connection.settimeout(_STALLED_S)
        return True

    def receive(self) -> Any:
        """The next message, whenever it begins to come; its arrays may be written to. Raises ChannelError."""
        while not self.poll(_STALLED_S):
            pass
        lengths = [self._length() for _ in range(self._length())]
        pickled, *arrays = [self._exactly(length) for length in lengths]
        return pickle.loads(pickled, buffers=arrays)  # noqa: S301 - of who knew the key

    def shut_down(self) -> None:
        """Whoever waits for a message, in another thread or there, has a ChannelError."""
        with suppress(OSError):  # it is broken already
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """What was sent arrives."""
        self._connection.close()

    def _length(self) -> int:
        return int(_LENGTH.unpack(self._exactly(_LENGTH.size))[0])

    def _exactly(self, num_bytes: int) -> memoryview:
        return _read(self._connection, num_bytes)


class ChannelListener:
    """A place where one connection is awaited.

    Args:
        host: an address of this machine, by which the other one reaches it.

    Attributes:
        address: host and port.
        key: that whoever connects has to show.
    """

    def __init__(self, host: str) -> None:
        self._server = socket.create_server((host, 0))
        self.address: tuple[str, int] = (host, self._server.getsockname()[1])
        self.key = secrets.token_bytes(_KEY_BYTES)

    def accept(self) -> DirectChannel:
        """Whoever shows the key first; then nobody else is let in. Raises ChannelError: nobody came."""
        ends_at = time.monotonic() + _TO_CONNECT_S
        with self._server:
            while (left_s := ends_at - time.monotonic()) > 0:
                self._server.settimeout(left_s)
                try:
                    connection, _ = self._server.accept()
                except OSError:
                    continue
                if self._knows_key(connection):
                    return DirectChannel(connection)
                connection.close()
        raise ChannelError("nobody connected")

    def _knows_key(self, connection: socket.socket) -> bool:
        connection.settimeout(_TO_CONNECT_S)
        try:
            return hmac.compare_digest(_read(connection, _KEY_BYTES), self.key)
        except ChannelError:
            return False


def connect(address: tuple[str, int], key: bytes) -> DirectChannel:
    """To where an `ChannelListener` is. Raises ChannelError: it is not to be reached from here."""
    try:
        connection = socket.create_connection(address, timeout=_TO_CONNECT_S)
        connection.sendall(key)
    except OSError as problem:
        raise ChannelError(str(problem)) from None
    return DirectChannel(connection)


def _read(connection: socket.socket, num_bytes: int) -> memoryview:
    found = np.empty(num_bytes, np.uint8).data
    num_read = 0
    while num_read < num_bytes:
        try:
            came = connection.recv_into(found[num_read:])
        except OSError as problem:
            raise ChannelError(str(problem)) from None
        if not came:
            raise ChannelError("it was closed")
        num_read += came
    return found
