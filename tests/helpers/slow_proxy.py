"""A TCP proxy with a slow uplink: clients' bytes pass at a limited rate."""

import contextlib
import socket
import threading
import time


class SlowProxy:
    """Forwards connections on its `port` to a local `target`; use as a context.

    Attributes:
        uplink_bps: rate limit of clients' bytes; None: no limit. It may be changed at any time.
        up_bytes: bytes that clients have sent so far.
    """

    def __init__(self, target, uplink_bps):
        self.uplink_bps = uplink_bps
        self.up_bytes = 0
        self._target = target
        self._sockets = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)  # a slow link buffers little
        self.port = self._server.getsockname()[1]

    def __enter__(self):
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, kind, problem, trace):
        for one in [self._server, *self._sockets]:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self):
        while True:
            try:
                client = self._server.accept()[0]
            except OSError:
                return
            broker = socket.create_connection(("127.0.0.1", self._target))
            self._sockets += [client, broker]
            threading.Thread(target=self._pass, args=(client, broker, True), daemon=True).start()
            threading.Thread(target=self._pass, args=(broker, client, False), daemon=True).start()

    def _pass(self, source, sink, up):
        with contextlib.suppress(OSError):
            while data := source.recv(2048):
                if up:
                    self.up_bytes += len(data)
                    time.sleep(len(data) * 8 / self.uplink_bps if self.uplink_bps else 0)
                sink.sendall(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
