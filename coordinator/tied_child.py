"""Starts a child process that ends when this process ends, even if this process is killed."""

import os
import sys

# PR_SET_PDEATHSIG survives exec, and is cleared when a process changes its user, so the user changes first.
# The comparison covers a parent that died before the signal was set.
_TIED = """
import ctypes, os, sys
if sys.argv[3]:
    import pwd
    user = pwd.getpwnam(sys.argv[3])
    os.initgroups(user.pw_name, user.pw_gid)
    os.setgid(user.pw_gid)
    os.setuid(user.pw_uid)
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, int(sys.argv[2]))
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[4], sys.argv[4:])
"""


def tied(command: list[str], number: int, user: str = "") -> list[str]:
    """Return a command line that runs `command` so that the kernel signals it when its parent thread ends.

    This works on Linux; on other systems no signal is sent. Start the command from a thread that lives as
    long as the child.

    Args:
        command: absolute path of a program, and its arguments.
        number: the signal's number.
        user: the user as whom the command runs if this process is root; "" keeps the present user.
    """
    return [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), str(number), user, *command]
