"""A direct connection between this machine and a worker on a node, for the data of all tasks.

Ray moves an argument or a result above 100 kB through the object stores of both nodes. That takes 2 to 3 ms
of processor time each way, as long as training a small network. Ray still places the workers and reports
deaths. A peer must first send a key that it got through Ray; before that, no data from it is unpickled.
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
_STALLED_S = 60.0  # maximum pause within a message; after that the node counts as lost
_LENGTH = struct.Struct(">Q")


class ChannelError(Exception):
    """The connection broke, or could not be opened."""


class DirectChannel:
    """Sends and receives objects that `pickle` supports; arrays are sent without a copy.

    Args:
        connection: a connected socket whose peer has shown the key.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(_STALLED_S)
        self._connection = connection

    def send(self, message: Any) -> None:
        """Send a message. Raises ChannelError."""
        arrays: list[pickle.PickleBuffer] = []
        pickled = pickle.dumps(message, protocol=5, buffer_callback=arrays.append)
        parts = [memoryview(pickled), *(array.raw() for array in arrays)]
        lengths = [len(parts), *(part.nbytes for part in parts)]
        try:
            for part in (memoryview(b"".join(map(_LENGTH.pack, lengths))), *parts):
                num_sent = 0
                # a timeout for each piece: `sendall` has one for the whole message
                while num_sent < part.nbytes:
                    num_sent += self._connection.send(part[num_sent:])
        except OSError as problem:
            raise ChannelError(str(problem)) from None

    def poll(self, patience_s: float) -> bool:
        """True if a message starts to arrive within `patience_s` seconds. Raises ChannelError."""
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
        """Wait for the next message; its arrays are writable. Raises ChannelError."""
        while not self.poll(_STALLED_S):
            pass
        lengths = [self._length() for _ in range(self._length())]
        pickled, *arrays = [self._exactly(length) for length in lengths]
        return pickle.loads(pickled, buffers=arrays)  # noqa: S301 - of who knew the key

    def shut_down(self) -> None:
        """Break the connection: every pending `receive`, on both sides, raises ChannelError."""
        with suppress(OSError):  # the connection is already broken
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; data already sent still arrives."""
        self._connection.close()

    def _length(self) -> int:
        return int(_LENGTH.unpack(self._exactly(_LENGTH.size))[0])

    def _exactly(self, num_bytes: int) -> memoryview:
        return _read(self._connection, num_bytes)


class ChannelListener:
    """Listens for one connection.

    Args:
        host: an address of this machine that the peer can reach.

    Attributes:
        address: host and port.
        key: the key that the peer has to send.
    """

    def __init__(self, host: str) -> None:
        self._server = socket.create_server((host, 0))
        self.address: tuple[str, int] = (host, self._server.getsockname()[1])
        self.key = secrets.token_bytes(_KEY_BYTES)

    def accept(self) -> DirectChannel:
        """Return the first connection that sends the key, then close the port.

        Raises:
            ChannelError: no connection arrived in time.
        """
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
        raise ChannelError("no worker connected in time")

    def _knows_key(self, connection: socket.socket) -> bool:
        connection.settimeout(_TO_CONNECT_S)
        try:
            return hmac.compare_digest(_read(connection, _KEY_BYTES), self.key)
        except ChannelError:
            return False


def connect(address: tuple[str, int], key: bytes) -> DirectChannel:
    """Connect to a `ChannelListener`. Raises ChannelError if the listener cannot be reached."""
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
