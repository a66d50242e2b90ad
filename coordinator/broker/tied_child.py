"""A child process that does not outlive us, however we die."""

import os
import sys

# PR_SET_PDEATHSIG survives exec, and is cleared when a process changes its user: so that comes first. The
# comparison covers a parent that died before it was set.
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
    """A command line that runs `command`, and asks the kernel first to send it a signal when its parent ends.

    The parent is the thread that starts it (Linux), so start it from one that lives as long as it shall. On
    other systems nothing is asked.

    Args:
        command: absolute path of a program, and its arguments.
        number: of the signal.
        user: that it runs as, where we are root; "": ours.
    """
    return [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), str(number), user, *command]
