"""Runs work that needs torch in a child process, so that the coordinator's own memory stays small."""

import logging
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

from fleetune.coordinator.run.models import Model, find_model, is_at_hand
from fleetune.protocols.errors import FleetuneError, ModelError
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.user_code import as_line

log = logging.getLogger(__name__)

LONGEST_S = 1800.0
_PR_SET_PDEATHSIG = 1

Result = TypeVar("Result")


def in_child_process(
    what: str, function: Callable[..., Result], *arguments: object, timeout_s: float = LONGEST_S
) -> Result:
    """Call `function` in a child process and return its result; the child ends with the call or this process.

    Args:
        what: the work, for messages.
        function: at the top level of a module; arguments and result can be pickled.
        arguments: arguments of the function.
        timeout_s: time limit in seconds.

    Raises:
        FleetuneError: the function raised this error.
        ModelError: the function raised another error, its process died, or time is up.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(there, os.getpid(), function, arguments), daemon=True)
    process.start()
    there.close()
    try:
        if not here.poll(timeout_s):
            raise ModelError(f"{what}: no result after {timeout_s:g} s")
        problem, result, trace = here.recv()
    except EOFError:
        process.join()
        raise ModelError(
            f"{what}: its process ended with exit code {process.exitcode}; is there enough memory?"
        ) from None
    finally:
        here.close()
        process.kill()
        process.join()
    if trace:
        log.debug("%s: %s", what, trace)
    if problem is not None:
        raise problem
    found: Result = result
    return found


def find_model_in_child(settings: RunSettings) -> Model:
    """Return what `find_model` returns, without importing torch in this process. Raises as `find_model`."""
    return (
        find_model(settings) if is_at_hand(settings) else in_child_process("the model", find_model, settings)
    )


def _work(
    there: Connection, parent: int, function: Callable[..., object], arguments: tuple[object, ...]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: our parent decides what it means
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    try:
        there.send((None, function(*arguments), ""))
    except FleetuneError as problem:
        there.send((type(problem)(str(problem)), None, ""))
    except Exception as problem:  # noqa: BLE001 - torch and a user's model may raise anything
        there.send((ModelError(as_line(problem)), None, traceback.format_exc()))
