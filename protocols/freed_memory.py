"""Returns freed memory to the operating system, because the C library would keep freed blocks for later."""

import ctypes
import gc
import sys

LARGE_BYTES = 2**20
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc's malloc.h


def return_large_blocks() -> None:
    """Let the C library (glibc) return each block of a megabyte or more as soon as it is freed.

    By default it learns to keep blocks of up to 32 MB, so that a payload or a layer would stay in memory
    after its use. Call it once, at the start of a process.
    """
    if sys.platform == "linux":
        set_option = getattr(ctypes.CDLL(None), "mallopt", None)
        if set_option is not None:
            set_option(_MMAP_THRESHOLD, LARGE_BYTES)


def give_back(*, cycles: bool = False) -> None:
    """Return freed memory to the system, if the C library supports it (glibc); takes a fraction of a
    millisecond.

    Args:
        cycles: collect cyclic garbage first, which takes as long as a small round.
    """
    if cycles:
        gc.collect()
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl and Android's C library have no malloc_trim
    if trim is not None:
        trim(0)
