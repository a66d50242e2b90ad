"""Ends a command of edge-sim with one line on Ctrl-C and SIGTERM, and with the exit codes that shells
expect: 130, 143.
"""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from fleetune.protocols.one_line import one_line_errors


class ReportedInterrupt(KeyboardInterrupt):
    """An interrupt whose place and remedy have been printed already."""


@contextmanager
def in_one_line(program: str) -> Iterator[None]:
    """Like `one_line_errors`, and print a line for an interrupt that has not been reported.

    An interrupt can surface as any exception: inside an import it becomes an ImportError.
    """
    heard: list[int] = []

    def stop(number: int, _: object) -> NoReturn:
        heard.append(number)
        raise KeyboardInterrupt

    ours = [number for number in (signal.SIGINT, signal.SIGTERM) if _stops_us(number)]
    before = {number: signal.signal(number, stop) for number in ours}
    try:
        with one_line_errors(program):
            yield
    except BaseException as problem:
        if not heard:
            raise
        if not isinstance(problem, ReportedInterrupt):
            print(f"{program}: stopped; give the same command again", file=sys.stderr)
        raise SystemExit(128 + heard[0]) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stops_us(number: int) -> bool:
    """True if the signal has its default handler; a program like nohup may have changed it."""
    return signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)
