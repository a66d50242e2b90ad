"""A child process that ends when this process ends, however that happens."""

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
    """A command line that runs `command` and makes the kernel signal it when its parent thread ends (Linux).

    Start it from a thread that lives as long as the child. On other systems no signal is sent.

    Args:
        command: absolute path of a program, and its arguments.
        number: the signal's number.
        user: user that it runs as, if we are root; "": our user.
    """
    return [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), str(number), user, *command]
