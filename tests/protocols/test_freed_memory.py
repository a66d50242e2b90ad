"""Memory that was freed goes back to the board."""

import ctypes
import subprocess
import sys

import pytest

from fleetune.protocols import freed_memory

CODE = """
import ctypes
from fleetune.protocols.freed_memory import give_back
from fleetune.edge_agent.probes.memory import process_memory
lib = ctypes.CDLL(None)
lib.malloc.restype, lib.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
blocks = [lib.malloc(100_000) for _ in range(500)]
for block in blocks:
    ctypes.memset(block, 1, 100_000)
on_top = lib.malloc(100_000)  # keeps the heap from shrinking by itself
for block in blocks:
    lib.free(block)
before = process_memory().resident
give_back()
print(before - process_memory().resident)
"""


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc"
)
def test_freed_memory_is_returned():
    found = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert int(found.stdout) > 40_000_000


def test_where_the_c_library_cannot_nothing_happens(monkeypatch):
    monkeypatch.setattr(freed_memory.ctypes, "CDLL", lambda _: object())
    freed_memory.give_back(cycles=True)
    monkeypatch.setattr(freed_memory.sys, "platform", "win32")
    freed_memory.give_back()
