"""The child process of an `Agent`: starts it, watches it, and restarts it when it dies."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import IO, Any

import msgspec

from fleetune.edge_agent.library.messages import (
    STOP,
    ChildMessage,
    Ended,
    Failed,
    Ready,
    Start,
    encode,
    read_message,
)
from fleetune.protocols import errors
from fleetune.protocols.errors import FleetuneError, SettingError
from fleetune.protocols.one_line import unexpected
from fleetune.protocols.systemd.notify import ENVIRONMENT

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 300.0
STABLE_S = 60.0  # a child that ran for so long is restarted after the shortest pause

_COMMAND = ("-P", "-m", "fleetune.edge_agent.library.child_main")

log = logging.getLogger(__name__)

_processes: "weakref.WeakSet[AgentProcess]" = weakref.WeakSet()


class AgentProcess:
    """The child process of one Agent.

    Args:
        options: fields of `RunOptions`.
        lock: file that locks the state folder; the child holds it too.
        on_message: called in a thread of its own with each message of the child, and with `Ended`.
    """

    def __init__(
        self, options: dict[str, Any], lock: IO[bytes], on_message: Callable[[ChildMessage], None]
    ) -> None:
        self._options, self._lock, self._on_message = options, lock, on_message
        self._folder = os.getcwd()  # noqa: PTH109 - as a text, for the child
        self._started: Future[None] = Future()
        self._closing = threading.Event()
        self._starting = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._watch, name="agent", daemon=True)
        _processes.add(self)

    @property
    def pid(self) -> int | None:
        """Process id of the child; None if it does not run now."""
        process = self._process
        return None if process is None or process.returncode is not None else process.pid

    def start(self) -> None:
        """Start the child, and wait until it has checked its options and its state.

        Raises:
            FleetuneError: the error that `edge-agent run` would report.
        """
        self._thread.start()
        self._started.result()

    def close(self, patience_s: float) -> None:
        """Ask the child to stop at a safe point. After `patience_s` it is killed, which loses nothing."""
        with self._starting:
            self._closing.set()
        process = self._process
        try:
            if process is not None and process.stdin is not None:
                with suppress(OSError, ValueError):
                    process.stdin.write(STOP)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(patience_s)
        finally:
            if process is not None and process.poll() is None:
                process.kill()
            if self._thread.ident is not None:
                self._thread.join(5.0)

    def release(self) -> None:
        """Close the files in a forked copy of this process.

        The child and the state folder belong to the original process.
        """
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        self._lock.close()

    def _watch(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._closing.is_set():
            began = time.monotonic()
            end = self._run_child()
            if not self._started.done():
                self._started.set_exception(end)
                return
            if self._closing.is_set():
                return
            if time.monotonic() - began > STABLE_S:
                pause_s = FIRST_PAUSE_S
            self._deliver(Ended(f"{end}; it is restarted in {pause_s:g} s"))
            self._closing.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _run_child(self) -> FleetuneError:
        """Run the child until it ends, and return the reason why it ended."""
        reading, writing = os.pipe()
        with os.fdopen(reading, "rb") as output:
            try:
                process = self._spawn(writing)
            except OSError as problem:
                return SettingError(
                    f"cannot start the agent's process with {sys.executable}: {problem.strerror}"
                )
            finally:
                os.close(writing)
            failed = None
            for line in output:
                with suppress(msgspec.MsgspecError):  # a killed child may leave an incomplete last line
                    message = read_message(line)
                    failed = message if isinstance(message, Failed) else failed
                    self._deliver(message)
        code = process.wait()
        if process.stdin is not None:
            process.stdin.close()
        if failed is not None:
            kind = getattr(errors, failed.kind, FleetuneError)
            found: FleetuneError = kind(failed.line)
            return found
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return FleetuneError(f"the agent's process ended ({how})")

    def _spawn(self, writing: int) -> subprocess.Popen[bytes]:
        with self._starting:
            if self._closing.is_set():
                raise OSError(0, "closed")
            process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, *_COMMAND],
                bufsize=0,
                cwd=self._folder,
                env=self._environment(),
                stdin=subprocess.PIPE,
                pass_fds=(writing, self._lock.fileno()),
                start_new_session=True,
            )
            self._process = process
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.write(encode(Start(self._options, self._lock.fileno(), writing)))
        return process

    def _environment(self) -> dict[str, str]:
        """Return this process's environment for the child, with the same module paths.

        Variables of systemd's notifications are left out.
        """
        found = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
        return {**found, "PYTHONPATH": os.pathsep.join(path or self._folder for path in sys.path)}

    def _deliver(self, message: ChildMessage) -> None:
        if isinstance(message, Ready) and not self._started.done():
            self._started.set_result(None)
        try:
            self._on_message(message)
        except Exception as fault:  # noqa: BLE001 - a handler of the owner's logging may raise anything
            log.debug("not heard: %s", unexpected(fault))


def _after_fork() -> None:
    for one in [*_processes]:
        one.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
