"""What a service does about each of its runs: begin it, leave it alone, end it, begin it again later.

No processes, no clock: a `Launch` begins them, and time is told. What a run does of its own accord (its
rounds, a pause) is none of a service's business: the run itself reads its control file.
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
STEADY_S = 600.0  # a run that was up for so long has not crashed in a row
END_S = 30.0  # to end by itself

State = Literal["running", "ending", "stopped", "finished", "waiting", "failed", "wrong"]


class Process(Protocol):
    """A run's process."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Its exit code; None: it is there."""
        ...

    def send_signal(self, number: int) -> None: ...

    def last_words(self) -> str:
        """The last line that it said; "": none."""
        ...


Launch = Callable[[RunFile], Process]


@dataclass
class SupervisedRun:
    """One run.

    Attributes:
        file: its settings as they were read last.
        state: `waiting` for the fleet to be free; `failed`: it ended by itself and is begun again.
        words: why.
        process: that is at it; None: none is.
        begun: the file that a process was begun with last.
        began_at: when; failures: how often in a row it ended by itself.
        again_at: it is not begun before.
        end_by: it was asked to end, and has until then; None: it was not.
        control: the requests that were read last.
        refused: a change of the file that the run cannot go on with.
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
        """How it stands now; what is new is logged."""
        if (state, words) != (self.state, self.words):
            level = logging.WARNING if state in ("failed", "wrong") else logging.INFO
            log.log(level, "%s: %s%s", self.file.name, state, f": {words}" if words else "")
        self.state, self.words = state, words


@dataclass
class Supervisor:
    """All runs of one service.

    Attributes:
        runs: the folder of their folders.
        launch: begins a run's process.
        watched: by file.
    """

    runs: Path
    launch: Launch
    watched: dict[Path, SupervisedRun] = field(default_factory=dict)

    def look(self, files: Iterable[RunFile], now: float) -> None:
        """Do what is to be done at `now` (seconds that never jump) with the files as they are."""
        there = {one.path: one for one in files}
        for path, file in there.items():
            self.watched.setdefault(path, SupervisedRun(file)).file = file
        for path, one in list(self.watched.items()):
            self._tend(one, now, removed=path not in there)
            if path not in there and one.process is None:
                del self.watched[path]

    def end(self, now: float) -> bool:
        """End all; whether none is left. To be asked again until then."""
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
        """Whether the run could go on with its file as it is; if not, it goes on with the one from before."""
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
        """Whether its process has ended; then it is noted how."""
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
        """The other run of its fleet that a process is at."""
        others = (other for other in self.watched.values() if other is not one and other.process is not None)
        return next((other for other in others if (other.begun or other.file).fleet == one.file.fleet), None)

    def _ask_to_end(self, one: SupervisedRun, now: float, why: str) -> None:
        if one.end_by is None and one.process is not None:
            one.end_by = now + END_S
            one.process.send_signal(signal.SIGTERM)
            one.note("ending", why)

    def _folder(self, one: SupervisedRun) -> Path:
        return self.runs / one.file.name
