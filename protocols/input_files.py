"""Opens files that a user or another program supplies: regular files of limited size.

Such a file may be an endless pipe, a link to a device, a sparse file of 100 GB, or change while it is read.
`open_input` follows links and accepts regular files only. It never blocks, and reads at most the bytes that
its caller allows. Fleetune's own files in its own folders are not opened here.
"""

import errno
import gzip
import io
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from fleetune.protocols.errors import DataError, ReadingStopped
from fleetune.protocols.one_line import flat

MAX_SETTINGS_BYTES = 2**20  # for a TOML file, a list of classes, a certificate
_READ_BYTES = 2**20  # bytes between two checks of whether to stop
_BUFFER_BYTES = 2**16
_ANY_MEMORY_BYTES = 2**33  # if the system does not report its memory
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe (FIFO)"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)
_WORDS = {errno.ENOENT: "no such file", errno.EACCES: "no permission to read it"}
_FLAGS = os.O_RDONLY
# some systems lack some of these error numbers
for _flag in ("O_NONBLOCK", "O_CLOEXEC", "O_NOCTTY", "O_BINARY"):
    _FLAGS |= getattr(os, _flag, 0)

MakeError = Callable[[str], Exception]


@dataclass(frozen=True)
class _Limits:
    memory_bytes: int | None = None
    is_stopped: Callable[[], bool] = lambda: False


_limits: ContextVar[_Limits] = ContextVar("limits of input files", default=_Limits())  # noqa: B039 - frozen


@contextmanager
def input_limits(
    *, memory_bytes: int | None = None, is_stopped: Callable[[], bool] | None = None
) -> Iterator[None]:
    """Set limits for reading in this thread, inside this context.

    Args:
        memory_bytes: memory for the content of one file; None: unchanged.
        is_stopped: called at least once per MiB; when it returns True, reading raises `ReadingStopped`. None:
            unchanged.
    """
    now = _limits.get()
    new = replace(
        now,
        memory_bytes=now.memory_bytes if memory_bytes is None else memory_bytes,
        is_stopped=now.is_stopped if is_stopped is None else is_stopped,
    )
    token = _limits.set(new)
    try:
        yield
    finally:
        _limits.reset(token)


def memory_limit_bytes() -> int:
    """Return the memory for the content of one file: the limit of `input_limits`, or the machine's memory."""
    found = _limits.get().memory_bytes
    if found is not None:
        return found
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return _ANY_MEMORY_BYTES


def check_stop() -> None:
    """Raise ReadingStopped if `input_limits` asks this thread to stop reading."""
    if _limits.get().is_stopped():
        raise ReadingStopped("stopped while a file was read")


def open_input(
    path: Path, max_bytes: int | None = None, *, error: MakeError = DataError, unpack: bool = False
) -> BinaryIO:
    """Open a user's file for reading bytes.

    Every fault, here and while the file is read, is raised as `error` with a line that names the path, the
    fault and the remedy.

    Args:
        path: of the file; links are followed.
        max_bytes: largest size of the file; None: `memory_limit_bytes()`.
        error: makes an exception from the line.
        unpack: decompress a file whose name ends with `.gz`; `max_bytes` bounds both sizes.

    Raises:
        error: the file is missing, not regular, too large, or unreadable.
        ReadingStopped: see `input_limits`.
    """
    limit = memory_limit_bytes() if max_bytes is None else max_bytes
    file = _regular_file(path, limit, error)
    found = _Bounded(file, path, limit, error)
    if unpack and path.suffix == ".gz":
        found = _Bounded(_Packed(io.BufferedReader(found)), path, limit, error)
    return io.BufferedReader(found, _BUFFER_BYTES)


def read_input(
    path: Path, max_bytes: int | None = None, *, error: MakeError = DataError, unpack: bool = False
) -> bytes:
    """Return the content of a user's file. Raises the errors of `open_input`."""
    with open_input(path, max_bytes, error=error, unpack=unpack) as file:
        return file.read()


def read_text_input(path: Path, max_bytes: int = MAX_SETTINGS_BYTES, *, error: MakeError = DataError) -> str:
    """Return the content of a user's UTF-8 text file, without a byte-order mark.

    Raises as `open_input`; also `error` if it is not UTF-8.
    """
    data = read_input(path, max_bytes, error=error)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise error(f"{path}: not UTF-8 text (byte {problem.start}); save it as UTF-8") from None


def open_text_input(path: Path, max_bytes: int | None = None, *, error: MakeError = DataError) -> TextIO:
    """Open a user's UTF-8 text file for reading, decompressed, with the line ends that the csv module needs.

    Raises as `open_input`. Bytes that are not UTF-8 raise UnicodeDecodeError when they are read.
    """
    file = open_input(path, max_bytes, error=error, unpack=True)
    return io.TextIOWrapper(file, encoding="utf-8-sig", newline="")


def _regular_file(path: Path, max_bytes: int, error: MakeError) -> io.FileIO:
    """Open a file without blocking, and check it before and after.

    Before, because opening some devices changes them; after, because the path may lead to another file by
    then.
    """
    try:
        found = os.stat(path)  # noqa: PTH116 - as the line below
        if (problem := _problem(found, path, max_bytes)) is None:
            file = io.FileIO(os.open(path, _FLAGS), "rb")
            problem = _problem(os.fstat(file.fileno()), path, max_bytes)
            if problem is None:
                return file
            file.close()
    except OSError as fault:
        problem = f"{path}: {_WORDS.get(fault.errno or 0) or fault.strerror or 'cannot be read'}"
    except ValueError as fault:  # a zero byte in the name
        problem = f"{path}: {flat(fault)}"
    raise error(problem)


def _problem(found: os.stat_result, path: Path, max_bytes: int) -> str | None:
    """Return why such a file is not read; None if it is."""
    if not stat.S_ISREG(found.st_mode):
        kind = next((words for is_kind, words in _KINDS if is_kind(found.st_mode)), "no regular file")
        return f"{path} is {kind}; expected a regular file"
    return None if found.st_size <= max_bytes else too_large(path, found.st_size, max_bytes)


def too_large(path: Path, num_bytes: int | None, max_bytes: int, what: str = "") -> str:
    """Return the message for a file that is too large.

    Args:
        path: of the file.
        num_bytes: its size, or that of its content; None: more than `max_bytes`.
        max_bytes: the limit.
        what: which bytes these are, such as "unpacked"; empty: the file's own.
    """
    has = f"more than {size_words(max_bytes)}" if num_bytes is None else size_words(num_bytes)
    beside = f" {what}" if what else ""
    return f"{path}: {has}{beside}; at most {size_words(max_bytes)} are read: make it smaller or split it"


def size_words(num_bytes: int) -> str:
    """Return a number of bytes as text for people."""
    for power, unit in ((3, "GB"), (2, "MB"), (1, "kB")):
        if num_bytes >= 1000**power:
            return f"{num_bytes / 1000**power:,.1f} {unit}"
    return f"{num_bytes} bytes"


class _Packed(gzip.GzipFile):
    """A decompressing stream that also closes the stream below it."""

    def __init__(self, file: io.BufferedReader) -> None:
        super().__init__(fileobj=file, mode="rb")
        self._below = file

    def close(self) -> None:
        super().close()
        self._below.close()


class _Bounded(io.RawIOBase):
    """A stream that reads at most `max_bytes`, checks whether to stop, and names its faults.

    It has no file descriptor, so that its limits cannot be bypassed.
    """

    def __init__(
        self, source: io.FileIO | gzip.GzipFile, path: Path, max_bytes: int, error: MakeError
    ) -> None:
        self._source, self._path, self._max_bytes, self._error = source, path, max_bytes, error
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:  # zipfile seeks to invalid positions
        self._at = self._source.seek(offset, whence)
        return self._at

    def readinto(self, buffer: Any) -> int:
        check_stop()
        view = memoryview(buffer).cast("B")[:_READ_BYTES]
        with self._named():
            count = self._source.readinto(view)  # type: ignore[union-attr, unused-ignore]
        if count is None:
            raise self._error(f"{self._path}: has no content to read just now; expected a regular file")
        self._at += count
        if self._at > self._max_bytes:  # the file grew, or it is compressed
            raise self._error(too_large(self._path, None, self._max_bytes))
        return int(count)

    def readall(self) -> bytes:
        parts = []
        while part := self.read(_READ_BYTES):
            parts.append(part)
        return b"".join(parts)

    def close(self) -> None:
        if not self.closed:
            self._source.close()
        super().close()

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError, zlib.error) as fault:
            words = flat(getattr(fault, "strerror", None) or fault)
            raise self._error(f"{self._path}: cannot be read ({words}); copy it again") from None
