"""Starts the server of the join exchange as a child process of the coordinator, see `join_service`."""

import os
import selectors
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from fleetune.coordinator.fleet.fleet_folder import FleetFolder
from fleetune.coordinator.tied_child import most_open_files, tied
from fleetune.protocols.errors import TransportError

START_S, STOP_S = 20.0, 5.0
READY = "ready"  # the child prints it and its port, or one line that says why it does not start
_SERVICE = "fleetune.coordinator.fleet.join_service"
_PYTHON_PATH = os.pathsep.join(filter(None, [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH")]))


class JoinServer:
    """A running join server, as a child process. `close` stops it; it also ends with this process.

    Attributes:
        port: the port that it listens on.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", port: int) -> None:
        self._process = process
        self.port = port

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self) -> int:
        """Wait until it ends, and return its exit code."""
        return self._process.wait()

    def close(self) -> None:
        """Stop it; do nothing if it has already stopped."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def start_join_server(folder: FleetFolder, bind: str, port: int) -> JoinServer:
    """Start a join server, and return it when it accepts connections. `FleetAddress` must have been written.

    Call it from a thread that lives as long as the server (see `tied_child`).

    Args:
        folder: the fleet's folder.
        bind: address to listen on; 0.0.0.0 for all, `::` also by IPv6.
        port: port to listen on; 0 selects a free one.

    Raises:
        TransportError: it does not start; the message is its last line.
    """
    module = [sys.executable, "-P", "-m", _SERVICE, str(folder.path.absolute()), bind, str(port)]
    process = subprocess.Popen(  # noqa: S603 - our own command line
        tied(module, signal.SIGKILL, open_files=most_open_files()),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": _PYTHON_PATH},
        process_group=0,  # Ctrl-C in a terminal must not end it before its coordinator has finished
    )
    said = _first_line(process)
    if said.startswith(READY):
        return JoinServer(process, int(said.removeprefix(READY)))
    JoinServer(process, port).close()
    raise TransportError(said or f"the join server did not start within {START_S:.0f} s")


def _first_line(process: "subprocess.Popen[bytes]") -> str:
    """Return the first line that a process prints within `START_S`; "" if it prints none."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as waiting:
        waiting.register(process.stdout, selectors.EVENT_READ)
        return process.stdout.readline().decode().strip() if waiting.select(START_S) else ""
