"""Starts edge-agent. It imports nothing large before an invitation's code has left the list of processes."""

import os
import sys

_LONGEST = 4096  # fits into a pipe


def main() -> None:
    """Run edge-agent with the arguments of this process."""
    arguments = sys.argv[1:]
    lines = [one for one in arguments if one.startswith("fleetune://") and len(one) < _LONGEST]
    if arguments[:1] == ["join"] and lines:
        _start_again(arguments, lines[0])
    from fleetune.edge_agent.cli import app

    app()


def _start_again(arguments: list[str], line: str) -> None:
    """Replace this process by one that reads the invitation from a pipe.

    Every user of the machine can read the arguments of a process, and the line holds a secret code.
    """
    reading, writing = os.pipe()
    os.write(writing, line.encode() + b"\n")
    os.close(writing)
    os.dup2(reading, 0)
    os.close(reading)
    path = os.pathsep.join(part or os.getcwd() for part in sys.path)  # noqa: PTH109
    without = ["-" if one == line else one for one in arguments]
    command = [sys.executable, "-P", "-m", "fleetune.edge_agent", *without]
    os.execve(sys.executable, command, {**os.environ, "PYTHONPATH": path})  # noqa: S606 - no shell is meant


if __name__ == "__main__":
    main()
