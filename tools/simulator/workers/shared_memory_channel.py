"""A line between two processes of one machine that take turns: what they tell each other lies in memory that
both see, and a pipe says when.

A pipe alone takes a model in pieces, each of which one process writes and the other reads: to a worker and
back, with its payload, a CNN of 582,026 parameters takes 16 ms so, and 3 by memory. An MLP of 52,650 takes
less than one either way. The memory has no name, and goes with the last of the two.
"""

import mmap
import os
import pickle
import socket
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, Self

_FIRST_BYTES, _MOST_BYTES = 2**20, 2**27


@dataclass(frozen=True)
class _InMemory:
    """In a pipe: what is told lies in so many bytes of memory."""

    num_bytes: int


@dataclass(frozen=True)
class _MemoryFollows:
    """In a pipe: the other end's memory comes next."""


class SharedMemory:
    """Memory without a name, as large as the largest that was written into it.

    Args:
        file: its descriptor.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._map = mmap.mmap(file, os.fstat(file).st_size)

    @classmethod
    def create(cls) -> Self | None:
        """None: this system has no such thing, or no room for it."""
        if not hasattr(os, "memfd_create"):
            return None
        try:
            file = os.memfd_create("fleetune")
        except OSError:
            return None
        os.ftruncate(file, _FIRST_BYTES)
        return cls(file)

    def send_to(self, pipe: Connection) -> None:
        """To the other end of a pipe."""
        with socket.socket(fileno=os.dup(pipe.fileno())) as sending:
            socket.send_fds(sending, [b"-"], [self._file])

    @classmethod
    def receive_from(cls, pipe: Connection) -> Self:
        """What the other end of a pipe gave. Raises EOFError: nothing came."""
        with socket.socket(fileno=os.dup(pipe.fileno())) as receiving:
            _, files, _, _ = socket.recv_fds(receiving, 1, 1)
        if not files:
            raise EOFError
        return cls(*files)

    def write(self, what: object) -> int | None:
        """In how many bytes it lies now; None: it takes more than there may be."""
        while True:
            self._map.seek(0)
            try:
                ForkingPickler(self._map, pickle.HIGHEST_PROTOCOL).dump(what)
            except ValueError:  # there is no more room; of any other the pipe will say so again
                if 2 * len(self._map) > _MOST_BYTES:
                    return None
                os.ftruncate(self._file, 2 * len(self._map))
                self._remap()
            else:
                return self._map.tell()

    def read(self, num_bytes: int) -> Any:
        """What was written in so many bytes; nothing of it stays in this memory."""
        if num_bytes > len(self._map):
            self._remap()
        with memoryview(self._map) as whole, whole[:num_bytes] as part:
            return pickle.loads(part)  # noqa: S301 - of a process that we began, or that began us

    def close(self) -> None:
        """For this end."""
        self._map.close()
        os.close(self._file)

    def _remap(self) -> None:
        """The other end, or this one, has made it larger."""
        self._map.close()
        self._map = mmap.mmap(self._file, os.fstat(self._file).st_size)


class SharedMemoryChannel:
    """One end of the line; until there is memory, the pipe takes all.

    Args:
        pipe: to the other end.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._memory: SharedMemory | None = None

    @property
    def closed(self) -> bool:
        return self._pipe.closed

    def share_memory(self) -> None:
        """From now on with memory, where this system has such. Raises OSError: the other end is gone."""
        self._memory = SharedMemory.create()
        if self._memory is not None:
            self._pipe.send(_MemoryFollows())
            self._memory.send_to(self._pipe)

    def send(self, what: object) -> None:
        """Once the other end has read what was sent before."""
        num_bytes = None if self._memory is None else self._memory.write(what)
        self._pipe.send(what if num_bytes is None else _InMemory(num_bytes))

    def send_by_pipe(self, what: object) -> None:
        """Whenever: the other end may still have to read what was sent before."""
        self._pipe.send(what)

    def receive(self) -> Any:
        """Raises EOFError, OSError: the other end is gone."""
        what = self._pipe.recv()
        if isinstance(what, _MemoryFollows):
            self._memory = SharedMemory.receive_from(self._pipe)
            return self.receive()
        if isinstance(what, _InMemory):
            assert self._memory is not None, "both ends have it"
            return self._memory.read(what.num_bytes)
        return what

    def close(self) -> None:
        self._pipe.close()
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()
