"""Decides for each run of a service: start it, leave it alone, end it, or restart it later.

This module starts no processes and reads no clock: a `Launch` starts processes, and times are arguments. A
service does not pause a run or open its rounds. The run itself does, and reads its own control file.
"""

import logging
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from fleetune.coordinator.commands.control_file import Control, read_control
from fleetune.coordinator.service.run_files import RunFile
from fleetune.coordinator.service.stored_run_checks import check_fits, is_finished
from fleetune.protocols.errors import FleetuneError

log = logging.getLogger(__name__)

FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 300.0
STEADY_S = 600.0  # a run that was up for longer starts a new series of failures
END_S = 30.0  # the time that a process has to end by itself before it is killed

State = Literal["running", "ending", "stopped", "finished", "waiting", "failed", "wrong"]


class Process(Protocol):
    """The process of a run, as the supervisor sees it."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""
        ...

    def send_signal(self, number: int) -> None: ...

    def last_words(self) -> str:
        """Return the last line of the process's output; "" if there is none."""
        ...


Launch = Callable[[RunFile], Process]


@dataclass
class SupervisedRun:
    """A run of the service, with its process and the state of its restarts.

    Attributes:
        file: the run's settings file as it was last read.
        state: `waiting` while another run uses the fleet; `failed` after an unexpected end, until the
            restart.
        words: the reason for the state.
        process: the process of the run; None if there is none.
        begun: the settings file with which the last process was started.
        began_at: the time at which the last process was started.
        failures: the number of consecutive failures.
        again_at: the earliest time at which the process is started again.
        end_by: the time at which the process is killed if it still runs; None if it was not asked to end.
        control: the pause and stop requests in the run's control file, as last read.
        refused: a changed settings file that the run rejected because it cannot continue with it.
    """

    file: RunFile
    state: State = "waiting"
    words: str = ""
    process: Process | None = None
    begun: RunFile | None = None
    began_at: float = 0.0
    failures: int = 0
    again_at: float = 0.0
    end_by: float | None = None
    control: Control = field(default_factory=Control)
    refused: RunFile | None = None

    def note(self, state: State, words: str = "") -> None:
        """Set the state and its reason; log them if they changed."""
        if (state, words) != (self.state, self.words):
            level = logging.WARNING if state in ("failed", "wrong") else logging.INFO
            log.log(level, "%s: %s%s", self.file.name, state, f": {words}" if words else "")
        self.state, self.words = state, words


@dataclass
class Supervisor:
    """Supervises all runs of one service.

    Attributes:
        runs: the folder that holds the folders of runs.
        launch: starts the process of a run.
        watched: the runs by the path of their file.
    """

    runs: Path
    launch: Launch
    watched: dict[Path, SupervisedRun] = field(default_factory=dict)

    def look(self, files: Iterable[RunFile], now: float) -> None:
        """Start, end or restart processes as the settings files require; `now` is in seconds of a monotonic
        clock.
        """
        there = {one.path: one for one in files}
        for path, file in there.items():
            self.watched.setdefault(path, SupervisedRun(file)).file = file
        for path, one in list(self.watched.items()):
            self._tend(one, now, removed=path not in there)
            if path not in there and one.process is None:
                del self.watched[path]

    def end(self, now: float) -> bool:
        """Ask all processes to end, and return True once none is left; call it repeatedly until then."""
        for one in self.watched.values():
            if one.process is not None and not self._is_over(one, now):
                self._ask_to_end(one, now, "the service ends")
        return all(one.process is None for one in self.watched.values())

    def _tend(self, one: SupervisedRun, now: float, *, removed: bool) -> None:
        if one.process is not None and not self._is_over(one, now):
            if removed:
                self._ask_to_end(one, now, f"{one.file.path} is gone")
            elif one.begun != one.file and one.file.settings is not None and self._may_change(one):
                self._ask_to_end(one, now, "its settings have changed")
            elif one.file.settings is None:
                one.note("running", f"with its settings from before: {one.file.problem}")
            return
        if not removed:
            self._begin_if_due(one, now)

    def _may_change(self, one: SupervisedRun) -> bool:
        """True if the run can continue with its changed file. If not, the run keeps its previous settings."""
        if one.refused == one.file:
            return False
        assert one.file.settings is not None, "a wrong file is no change"
        try:
            check_fits(self._folder(one), one.file.settings)
        except FleetuneError as problem:
            one.refused = one.file
            one.note("running", f"with its settings from before: {problem}")
            return False
        return True

    def _is_over(self, one: SupervisedRun, now: float) -> bool:
        """True if the run's process has ended; the run's state is then updated."""
        assert one.process is not None, "asked of a process"
        code = one.process.poll()
        if code is None:
            if one.end_by is not None and now > one.end_by:
                one.process.send_signal(signal.SIGKILL)
            return False
        said, asked = one.process.last_words(), one.end_by is not None
        one.process, one.end_by = None, None
        if code == 0 or asked:
            one.failures, one.again_at = 0, now if asked else now + FIRST_RETRY_S
            one.note("waiting", "to be begun again")
            return True
        one.failures = 1 if now - one.began_at > STEADY_S else one.failures + 1
        self._put_off(one, now, f"exit code {code}: {said}")
        return True

    def _put_off(self, one: SupervisedRun, now: float, why: str) -> None:
        pause_s = min(LONGEST_RETRY_S, FIRST_RETRY_S * 2 ** (one.failures - 1))
        one.again_at = now + pause_s
        one.note("failed", f"{why}; once more after {pause_s:g} s")

    def _begin_if_due(self, one: SupervisedRun, now: float) -> None:
        if one.file.settings is None:
            one.note("wrong", one.file.problem)
            return
        try:
            control = read_control(self._folder(one))
            if (one.begun is not None and one.begun != one.file) or (
                one.control.stopped and not control.stopped
            ):
                one.again_at, one.begun = 0.0, None
            one.control = control
            if control.stopped:
                one.note("stopped", "as ordered")
            elif now >= one.again_at:
                self._begin_if_possible(one, now)
        except FleetuneError as problem:
            one.note("wrong", str(problem))

    def _begin_if_possible(self, one: SupervisedRun, now: float) -> None:
        assert one.file.settings is not None, "a wrong file begins nothing"
        if is_finished(self._folder(one), one.file.settings):
            one.begun, one.again_at = one.file, float("inf")
            one.note("finished")
        elif (other := self._holder(one)) is not None:
            one.note("waiting", f"fleet {one.file.fleet} is served by run {other.file.name}")
        else:
            self._begin(one, now)

    def _begin(self, one: SupervisedRun, now: float) -> None:
        try:
            one.process = self.launch(one.file)
        except (FleetuneError, OSError) as problem:
            one.failures += 1
            self._put_off(one, now, f"cannot be begun: {problem}")
            return
        one.begun, one.began_at, one.refused = one.file, now, None
        one.note("running")

    def _holder(self, one: SupervisedRun) -> SupervisedRun | None:
        """Return another run of the same fleet that has a process; None if there is none."""
        others = (other for other in self.watched.values() if other is not one and other.process is not None)
        return next((other for other in others if (other.begun or other.file).fleet == one.file.fleet), None)

    def _ask_to_end(self, one: SupervisedRun, now: float, why: str) -> None:
        if one.end_by is None and one.process is not None:
            one.end_by = now + END_S
            one.process.send_signal(signal.SIGTERM)
            one.note("ending", why)

    def _folder(self, one: SupervisedRun) -> Path:
        return self.runs / one.file.name
