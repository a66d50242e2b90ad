"""The child process of an `Agent`: `edge-agent run`, with options and the stop command from a pipe.

The process has its own session, so that Ctrl-C in a terminal reaches only its parent. When the parent ends or
is killed, the pipe closes and this process ends at once. No stored data are lost.
"""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from fleetune.edge_agent.library.messages import (
    STOP,
    ActivityReport,
    ChildMessage,
    Failed,
    LogLine,
    Ready,
    Start,
    encode,
)
from fleetune.protocols.errors import FleetuneError, SettingError
from fleetune.protocols.one_line import unexpected

_READ_BYTES = 4096

log = logging.getLogger("fleetune.edge_agent.library.child_main")  # this module's own name is `__main__`


class _ParentPipe:
    """Sends messages to the parent, from any thread. Messages are dropped once the parent has ended."""

    def __init__(self, handle: int) -> None:
        self._handle, self._lock = handle, threading.Lock()

    def send(self, message: ChildMessage) -> None:
        line = memoryview(encode(message))
        with self._lock:
            try:
                while line:
                    line = line[os.write(self._handle, line) :]
            except OSError:
                return


class _LogToParent(logging.Handler):
    def __init__(self, parent: _ParentPipe) -> None:
        super().__init__(logging.INFO)
        self._parent = parent
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self._parent.send(LogLine(record.levelno, record.name, self.format(record)))


class _Commands:
    """Reads commands of the parent: the `Start` line, then perhaps `STOP`.

    The end of the pipe means that the parent has ended.
    """

    def __init__(self) -> None:
        self._rest = b""
        # before the agent is ready there is no fleet to leave
        self._stop: Callable[[], None] = lambda: os._exit(0)

    def first(self) -> bytes:
        """Return the first line; empty if the parent has ended."""
        while b"\n" not in self._rest:
            data = os.read(0, _READ_BYTES)
            if not data:
                return b""
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def listen(self) -> None:
        """Read further commands in a thread of its own."""
        threading.Thread(target=self._listen, name="commands", daemon=True).start()

    def call_at_stop(self, stop: Callable[[], None]) -> None:
        """Set the function that `STOP` calls."""
        self._stop = stop

    def _listen(self) -> None:
        while True:
            if STOP in self._rest:
                self._rest = b""
                self._stop()
            data = os.read(0, _READ_BYTES)
            if not data:
                os._exit(1)
            self._rest += data


def main() -> int:
    """Run the agent until the parent stops it, and return the exit code."""
    commands = _Commands()
    line = commands.first()
    if not line:
        return 1
    start = msgspec.json.decode(line, type=Start)
    parent = _ParentPipe(start.output)
    commands.listen()
    logging.basicConfig(level=logging.INFO, handlers=[_LogToParent(parent)])
    try:
        _run(start, commands, parent)
    except FleetuneError as problem:
        parent.send(Failed(type(problem).__name__, str(problem)))
        return 2
    except Exception as fault:
        parent.send(Failed("FleetuneError", f"the agent's process failed: {unexpected(fault)}"))
        raise
    return 0


def _run(start: Start, commands: _Commands, parent: _ParentPipe) -> None:
    from fleetune.edge_agent.agent import Stop
    from fleetune.edge_agent.run_options import RunOptions
    from fleetune.edge_agent.starting import ready_agent

    try:
        options = msgspec.convert(start.options, RunOptions, dec_hook=_from_text)
    except msgspec.ValidationError as problem:
        raise SettingError(f"Agent: {problem}") from None
    lock = os.fdopen(start.lock, "ab")
    agent = ready_agent(options, lock=lock, tell=lambda activity: parent.send(ActivityReport(activity)))
    commands.call_at_stop(lambda: agent.events.put(Stop("closed")))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: agent.events.put(Stop("stopped by a signal")))
    parent.send(Ready())
    log.info("left: %s", agent.run())


def _from_text(kind: type[Any], given: Any) -> Any:
    """Convert a text to a path."""
    return kind(given)


if __name__ == "__main__":
    sys.exit(main())
