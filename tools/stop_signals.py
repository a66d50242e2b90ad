"""Ctrl-C and SIGTERM end a command of edge-sim with one line, and the status that shells expect: 130, 143."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from fleetune.protocols.one_line import one_line_errors


class ReportedInterrupt(KeyboardInterrupt):
    """Interrupted, and whoever raised it has said where and what to do."""


@contextmanager
def in_one_line(program: str) -> Iterator[None]:
    """`one_line_errors`, and a line for who is interrupted and says nothing.

    An interrupt can come out as any exception: an import that it hit, for one, as ImportError.
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
    """Whether nobody decided otherwise, nohup for one."""
    return signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)
