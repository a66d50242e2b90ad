"""TCP ports for tests."""

import socket


def free_port():
    """A TCP port that is free now on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
