"""A child process that does not outlive us, however we die."""

import os
import sys

# PR_SET_PDEATHSIG survives exec; the comparison covers a parent that died before it was set.
_TIED = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, int(sys.argv[2]))
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[3], sys.argv[3:])
"""


def tied(command: list[str], number: int) -> list[str]:
    """A command line that runs `command`, and asks the kernel first to send it a signal when its parent ends.

    The parent is the thread that starts it (Linux), so start it from one that lives as long as it shall. On
    other systems nothing is asked.

    Args:
        command: absolute path of a program, and its arguments.
        number: of the signal.
    """
    return [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), str(number), *command]
