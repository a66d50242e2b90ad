"""Starts a child process that ends when this process ends, even if this process is killed."""

import os
import sys
from contextlib import suppress

MAX_OPEN_FILES = 16_384

# PR_SET_PDEATHSIG survives exec, and is cleared when a process changes its user, so the user changes first.
# The comparison covers a parent that died before the signal was set.
_TIED = """
import ctypes, os, sys
resource = __import__("resource") if int(sys.argv[4]) else None  # the new user may be unable to read modules
if sys.argv[3]:
    import pwd
    user = pwd.getpwnam(sys.argv[3])
    os.initgroups(user.pw_name, user.pw_gid)
    os.setgid(user.pw_gid)
    os.setuid(user.pw_uid)
if resource is not None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, int(sys.argv[4])), hard))
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, int(sys.argv[2]))
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[5], sys.argv[5:])
"""


def tied(command: list[str], number: int, user: str = "", *, open_files: int = 0) -> list[str]:
    """Return a command line that runs `command` so that the kernel signals it when its parent thread ends.

    This works on Linux; on other systems no signal is sent. Start the command from a thread that lives as
    long as the child.

    Args:
        command: absolute path of a program, and its arguments.
        number: the signal's number.
        user: the user as whom the command runs if this process is root; "" keeps the present user.
        open_files: number of files and connections that it may open at least; 0 keeps the limit.
    """
    return [
        sys.executable,
        "-I",
        "-S",
        "-c",
        _TIED,
        str(os.getpid()),
        str(number),
        user,
        str(open_files),
        *command,
    ]


def most_open_files() -> int:
    """Return how many files and connections a child process may open: the hard limit, at most 16,384.

    The usual soft limit of 1,024 is for programs that use `select`.
    """
    with suppress(ImportError):  # Windows
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        return MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    return 0
