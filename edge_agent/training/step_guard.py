"""Ends a run of ONNX Runtime that takes too long or is no longer needed, from a second thread."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fleetune.protocols.errors import FleetuneError, ModelError, TrainingStopped

IDLE_S = 5.0  # seconds without a run after which the thread ends; the next run starts another
LOOK_EVERY_S = 0.25  # seconds between checks; most steps end before the first one


@dataclass
class _Run:
    """One run of the runtime: the options that can end it, its start time, and why it was ended."""

    options: Any
    began: float
    problem: FleetuneError | None = None


class StepGuard:
    """Watches one run at a time.

    Args:
        stop: returns the reason to end a run, or None. Called from the guard's thread.
        longest_s: most seconds of a run; None for no limit.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        stop: Callable[[], str | None],
        longest_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stop, self._longest_s, self._clock = stop, longest_s, clock
        self._run: _Run | None = None
        self._begun = threading.Condition()
        self._thread: threading.Thread | None = None

    @contextmanager
    def over(self, options: Any) -> Iterator[_Run]:
        """Watch the run inside this context; a run that must end gets `options.terminate`, and `problem` the
        reason.
        """
        run = _Run(options, self._clock())
        with self._begun:
            self._run = run
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="step guard", daemon=True)
                self._thread.start()
            self._begun.notify()
        try:
            yield run
        finally:
            with self._begun:
                self._run = None

    def _watch(self) -> None:
        while True:
            with self._begun:
                if not self._begun.wait_for(lambda: self._run is not None, IDLE_S):
                    self._thread = None
                    return
                run = self._run
            time.sleep(LOOK_EVERY_S)
            if run is not None and run is self._run:
                self._look(run)

    def _look(self, run: _Run) -> None:
        took = self._clock() - run.began
        if self._longest_s is not None and took > self._longest_s:
            run.problem = ModelError(f"a step took longer than {self._longest_s:g} s and was ended")
        elif reason := self._stop():
            run.problem = TrainingStopped(f"training stopped during a step: {reason}")
        if run.problem is not None:
            run.options.terminate = True
