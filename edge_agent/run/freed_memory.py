"""Returns freed memory to the operating system, because the C library would keep freed blocks for later."""

import ctypes
import gc
import sys


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
