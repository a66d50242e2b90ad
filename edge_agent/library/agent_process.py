"""The child process that connects and trains for an Agent: started, watched, begun again when it dies."""

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
from fleetune.edge_agent.service.notify import ENVIRONMENT
from fleetune.protocols import errors
from fleetune.protocols.errors import FleetuneError, SettingError
from fleetune.protocols.one_line import unexpected

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 300.0
STEADY_S = 60.0  # whoever lived so long is begun again at once

_COMMAND = ("-P", "-m", "fleetune.edge_agent.library.child_main")

log = logging.getLogger(__name__)

_all: "weakref.WeakSet[AgentProcess]" = weakref.WeakSet()


class AgentProcess:
    """The process of one Agent.

    Args:
        options: of `RunOptions`.
        lock: by which the state folder is held; the child holds it too.
        hear: told what the child says, and how it ended, by a thread of its own.
    """

    def __init__(
        self, options: dict[str, Any], lock: IO[bytes], hear: Callable[[ChildMessage], None]
    ) -> None:
        self._options, self._lock, self._hear = options, lock, hear
        self._folder = os.getcwd()  # noqa: PTH109 - as a text, for the child
        self._begun: Future[None] = Future()
        self._closing = threading.Event()
        self._starting = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._watch, name="agent", daemon=True)
        _all.add(self)

    @property
    def pid(self) -> int | None:
        """Of the child; None: there is none just now."""
        process = self._process
        return None if process is None or process.returncode is not None else process.pid

    def start(self) -> None:
        """Return once the child has checked all that can be checked.

        Raises:
            FleetuneError: as `edge-agent run` would say it.
        """
        self._thread.start()
        self._begun.result()

    def close(self, patience_s: float) -> None:
        """Ask the child to end at a safe point; after that it is killed, which loses nothing either."""
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

    def forget(self) -> None:
        """In a copy of this process that `fork` made: neither the child nor the state folder is its own."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        self._lock.close()

    def _watch(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._closing.is_set():
            began = time.monotonic()
            end = self._live()
            if not self._begun.done():
                self._begun.set_exception(end)
                return
            if self._closing.is_set():
                return
            if time.monotonic() - began > STEADY_S:
                pause_s = FIRST_PAUSE_S
            self._tell(Ended(f"{end}; it is begun again in {pause_s:g} s"))
            self._closing.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _live(self) -> FleetuneError:
        """From the child's start to its end; why it ended."""
        reading, writing = os.pipe()
        with os.fdopen(reading, "rb") as words:
            try:
                process = self._spawn(writing)
            except OSError as problem:
                return SettingError(f"cannot start {sys.executable}: {problem.strerror}")
            finally:
                os.close(writing)
            failed = None
            for line in words:
                with suppress(msgspec.MsgspecError):  # the last one of a child that was killed
                    word = read_message(line)
                    failed = word if isinstance(word, Failed) else failed
                    self._tell(word)
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
        """Ours, but that modules are found as here, and that the child speaks for no service of ours."""
        found = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
        return {**found, "PYTHONPATH": os.pathsep.join(path or self._folder for path in sys.path)}

    def _tell(self, word: ChildMessage) -> None:
        if isinstance(word, Ready) and not self._begun.done():
            self._begun.set_result(None)
        try:
            self._hear(word)
        except Exception as fault:  # noqa: BLE001 - a handler of the owner's logging may raise anything
            log.debug("not heard: %s", unexpected(fault))


def _after_fork() -> None:
    for one in [*_all]:
        one.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
