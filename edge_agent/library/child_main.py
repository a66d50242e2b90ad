"""The child process of an Agent: `edge-agent run` that takes its options, and the wish to stop, from a pipe.

It is in a session of its own, so that Ctrl-C in a terminal is its parent's alone. When the parent is gone,
however that went, the pipe ends and so does this process, at once: like any other kill, that loses nothing.
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

log = logging.getLogger("fleetune.edge_agent.library.child_main")  # it runs as `__main__`


class _ParentPipe:
    """The way to the parent. Any thread may speak; when nobody hears, nothing is said."""

    def __init__(self, handle: int) -> None:
        self._handle, self._lock = handle, threading.Lock()

    def say(self, word: ChildMessage) -> None:
        line = memoryview(encode(word))
        with self._lock:
            try:
                while line:
                    line = line[os.write(self._handle, line) :]
            except OSError:
                return


class _LogToParent(logging.Handler):
    def __init__(self, words: _ParentPipe) -> None:
        super().__init__(logging.INFO)
        self._words = words
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self._words.say(LogLine(record.levelno, record.name, self.format(record)))


class _Commands:
    """What the parent writes: one line to start with, `STOP` perhaps, and an end."""

    def __init__(self) -> None:
        self._rest = b""
        self._stop: Callable[[], None] = lambda: os._exit(0)  # not ready yet: there is nothing to leave

    def first(self) -> bytes:
        """The first line; empty where the parent is gone already."""
        while b"\n" not in self._rest:
            data = os.read(0, _READ_BYTES)
            if not data:
                return b""
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def listen(self) -> None:
        """From now on, in a thread of its own."""
        threading.Thread(target=self._listen, name="commands", daemon=True).start()

    def call_at_stop(self, stop: Callable[[], None]) -> None:
        """What `STOP` leads to from now on."""
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
    """Run until told to stop; the exit code."""
    commands = _Commands()
    line = commands.first()
    if not line:
        return 1
    start = msgspec.json.decode(line, type=Start)
    words = _ParentPipe(start.words)
    commands.listen()
    logging.basicConfig(level=logging.INFO, handlers=[_LogToParent(words)])
    try:
        _run(start, commands, words)
    except FleetuneError as problem:
        words.say(Failed(type(problem).__name__, str(problem)))
        return 2
    except Exception as fault:
        words.say(Failed("FleetuneError", f"the agent's process: {unexpected(fault)}"))
        raise
    return 0


def _run(start: Start, commands: _Commands, words: _ParentPipe) -> None:
    from fleetune.edge_agent.agent import Stop
    from fleetune.edge_agent.run_options import RunOptions
    from fleetune.edge_agent.starting import ready_agent

    try:
        options = msgspec.convert(start.options, RunOptions, dec_hook=_made)
    except msgspec.ValidationError as problem:
        raise SettingError(f"Agent: {problem}") from None
    lock = os.fdopen(start.lock, "ab")
    agent = ready_agent(options, lock=lock, tell=lambda activity: words.say(ActivityReport(activity)))
    commands.call_at_stop(lambda: agent.events.put(Stop("closed")))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: agent.events.put(Stop("stopped by a signal")))
    words.say(Ready())
    log.info("left: %s", agent.run())


def _made(kind: type[Any], given: Any) -> Any:
    """A path of its text."""
    return kind(given)


if __name__ == "__main__":
    sys.exit(main())
