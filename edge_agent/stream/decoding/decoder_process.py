"""The agent's side of the decoder process: starts it, watches it and replaces it.

The first file starts the process, and it reads many files. It is replaced after a crash, when it takes too
long or too much memory, and after `MAX_FILES` files. It ends when it is idle, and when the agent ends or is
killed.
"""

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from fleetune.edge_agent.stream.decoding.frames import (
    LENGTH_BYTES,
    MAX_FRAME_BYTES,
    Block,
    DecodeRequest,
    FileKind,
    Frame,
    Refused,
    encode,
    read_frame,
)
from fleetune.protocols.errors import DataError
from fleetune.protocols.input_files import check_stop, open_input

MAX_FILES = 1000
IDLE_S = 60.0
SILENT_S = 60.0  # the longest pause between two frames of a file
MAX_CONTENT_BYTES = 2**28  # content of one file, on a board with enough memory
BASE_BYTES = 160 * 2**20  # memory of a process that has imported all decoders
_CONTENT_SHARE = 4  # the content of a file may take 1/4 of the agent's memory
_LOOK_S = 0.05
_COMMAND = ("-P", "-m", "fleetune.edge_agent.stream.decoding.child_main")
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class DecoderProcess:
    """A process that decodes files, one after another. Only one thread may use it.

    Args:
        memory_bytes: memory of the agent together with this process; None if unknown.
        clock: monotonic clock, in seconds.

    Attributes:
        max_bytes: largest content of a file, in bytes.
        num_started: number of decoder processes started so far.
    """

    def __init__(
        self,
        memory_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        share = MAX_CONTENT_BYTES if memory_bytes is None else memory_bytes // _CONTENT_SHARE
        self.max_bytes = min(MAX_CONTENT_BYTES, share)
        self.num_started = 0
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._num_files, self._used_at, self._looked_at = 0, 0.0, 0.0

    def decode(self, path: Path, kind: FileKind) -> Iterator[Block]:
        """Decode a file, and yield its samples in blocks.

        Raises:
            DataError: the file cannot be read, needs more than `max_bytes`, or ended the process.
            ReadingStopped: see `input_limits`.
        """
        open_input(path, self.max_bytes).close()
        request, whole = DecodeRequest(kind, str(path.absolute()), self.max_bytes), False
        try:
            self._send(path, request)
            while True:
                frame = self._receive(path)
                if isinstance(frame, Block):
                    yield frame
                    continue
                whole = True
                if isinstance(frame, Refused):
                    raise DataError(frame.words)
                return
        finally:
            self._used_at = self._clock()
            if not whole:
                self.close()

    def rest(self) -> None:
        """End the process if it has been idle for `IDLE_S`."""
        if self._process is not None and self._clock() - self._used_at > IDLE_S:
            self.close()

    def close(self) -> None:
        """End the process. The next file starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()

    def __del__(self) -> None:
        with suppress(Exception):  # the owner did not close it; the interpreter may be ending
            self.close()

    def _send(self, path: Path, request: DecodeRequest) -> None:
        if self._num_files >= MAX_FILES or (self._process is not None and self._process.poll() is not None):
            self.close()
        if self._process is None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        self._num_files += 1
        try:
            self._process.stdin.write(encode(request))
        except OSError:
            raise self._ended(path) from None

    def _start(self) -> None:
        """Start the process. Raises DataError."""
        environment = os.environ | dict.fromkeys(_THREADS, "1")
        environment["PYTHONPATH"] = os.pathsep.join(one for one in sys.path if one)
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, *_COMMAND],
                bufsize=0,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal shall reach the agent only
            )
        except OSError as problem:
            raise DataError(
                f"cannot start {sys.executable}, which decodes files: {problem.strerror}"
            ) from None
        self._num_files, self.num_started = 0, self.num_started + 1

    def _receive(self, path: Path) -> Frame:
        deadline = self._clock() + SILENT_S
        num_bytes = int.from_bytes(self._read(path, LENGTH_BYTES, deadline), "big")
        if num_bytes > MAX_FRAME_BYTES:
            raise self._ended(path)
        try:
            return read_frame(self._read(path, num_bytes, deadline))
        except ValueError:  # msgspec's decoding errors are ValueErrors
            raise self._ended(path) from None

    def _read(self, path: Path, num_bytes: int, deadline: float) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor, data = self._process.stdout.fileno(), bytearray()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while len(data) < num_bytes:
            check_stop()
            self._check_memory(path)
            if not poll.poll(1000 * _LOOK_S):
                if self._clock() > deadline:
                    raise DataError(f"{path}: reading it takes longer than {SILENT_S:g} s; it is skipped")
                continue
            part = os.read(descriptor, min(num_bytes - len(data), 2**20))
            if not part:
                raise self._ended(path)
            data += part
        return bytes(data)

    def _check_memory(self, path: Path) -> None:
        now = self._clock()
        if now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        assert self._process is not None
        limit = BASE_BYTES + self.max_bytes
        if (held := _resident_bytes(self._process.pid)) > limit:
            raise DataError(
                f"{path}: reading it takes {held >> 20} MiB of memory; at most {limit >> 20} MiB: split it"
            )

    def _ended(self, path: Path) -> DataError:
        """Return the error for a process that ended, or that sent an invalid frame."""
        return DataError(
            f"{path}: the process that read it ended; the file is damaged or hostile, so check it"
        )


def _resident_bytes(pid: int) -> int:
    """Return the memory that a process takes now, in bytes; 0 if it has ended."""
    import psutil

    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0
