"""What `edge-coordinator serve` shows and leaves: a live view or a line a round, then the report."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live

from fleetune.coordinator.reports.live import LiveView, plain_line
from fleetune.coordinator.reports.missing import Impatience, missing_from
from fleetune.coordinator.reports.outcome import with_personal
from fleetune.coordinator.reports.report import write_report
from fleetune.coordinator.reports.run_watch import Activity, Watch
from fleetune.coordinator.reports.summarise import summary_of
from fleetune.coordinator.reports.tables import device_table, fleet_table, prediction_table, run_table
from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.coordinator.run.round_journal import ROUNDS, RoundJournal
from fleetune.coordinator.run.stored_run import Run, mark_finished, save_shared_model
from fleetune.coordinator.serving.peers import Peer
from fleetune.coordinator.serving.server import Server
from fleetune.protocols.settings.run_settings import simulated_keys


class Presenter:
    """Shows one run, and reports it at its end.

    Args:
        run: the run.
        fleet: what its devices join.
        broker: where.
        clock: the server's.
    """

    def __init__(self, run: Run, fleet: str, broker: str, clock: Callable[[], float]) -> None:
        self._run = run
        self._clock = clock
        self._console = Console()
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._watch = Watch(run.settings, run.enrolment.spec.num_parameters)
        for record in run.controller.records():
            self._watch.note(record)
        self._journal = RoundJournal(run.folder, run.controller.records)
        self._impatience = Impatience()
        again = "goes on" if run.resumed else "begins"
        self.say(f"run {run.enrolment.run} {again}; fleet {fleet} at {broker}; folder {run.folder}")
        if unheeded := simulated_keys(run.settings):
            self.say(f"for simulations only, not heeded here: {', '.join(unheeded)}")

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def look(self, server: Server) -> None:
        """Draw the live view; in a log, say whom a round waits for."""
        controller = self._run.controller
        if self._live is None:
            state, settings = controller.engine_state, self._run.settings.round
            if word := self._impatience.word(state, settings, self._clock()):
                self.say(word)
            return
        busy = {device: _activity(peer) for device, peer in server.peers.items()}
        activities = {device: activity for device, activity in busy.items() if activity is not None}
        shot = self._watch.snapshot(
            controller.engine_state, controller.ledger, self._clock(), activities, server.problem
        )
        self._live.update(LiveView(shot), refresh=True)

    def closed(self, record: RoundRecord) -> None:
        """A round is over."""
        self._watch.note(record)
        self._journal.add(record)
        if self._live is None:
            state, settings = self._run.controller.engine_state, self._run.settings
            absent = missing_from(record, state, settings.round)
            self.say(plain_line(record, settings) + (f"  missing: {absent}" if absent else ""))

    def finish(self, reason: str | None) -> None:
        """Write the report of a finished run, or say how a stopped one goes on."""
        if self._live is not None:
            self._live.stop()
        if reason is None:
            self.say("stopped; the same command goes on with the run")
            return
        self.say(f"finished: {reason}")
        report_run(self._run, self._console)
        mark_finished(self._run)

    def say(self, line: str) -> None:
        """Print a line with the time, above the live view if there is one."""
        at = time.strftime("%Y-%m-%d %H:%M:%S")
        self._console.print(f"{at} {line}", highlight=False, markup=False, soft_wrap=True)


def report_run(run: Run, console: Console | None = None, *, live: bool = False) -> None:
    """Write the report of a run as it stands, and show its tables.

    Args:
        run: the run.
        console: to show them on.
        live: another process is at the run, and writes rounds.jsonl itself.
    """
    console = console or Console()
    summary, records = summary_of(run, simulated=False), run.controller.records()
    members = run.controller.engine_state.members
    boards = {device: one.report.board for device, one in members.items() if one.report}
    left_out = (ROUNDS,) if live else ()
    files = write_report(run.folder, run.settings, summary, records, boards=boards, left_out=left_out)
    files.append(save_shared_model(run))
    shown = with_personal(summary, records)
    console.print(device_table(shown, boards=boards))
    console.print(run_table(shown))
    if predictions := prediction_table(shown):
        console.print(predictions)
    for file in files:
        if file.suffix in (".html", ".json", ".safetensors"):
            console.print(f"  {file}", highlight=False, markup=False, soft_wrap=True)


def list_devices(run: Run) -> None:
    """Show the devices that the run knows."""
    Console().print(fleet_table(run.controller.engine_state))


def _activity(peer: Peer) -> Activity | None:
    """What the device is busy with, as far as the wire shows."""
    if not peer.online:
        return None
    if peer.link.outbox.progress is not None:
        return Activity("receiving", peer.link.outbox.progress)
    if peer.link.inbox.progress is not None:
        return Activity("sending", peer.link.inbox.progress)
    if peer.stage == "training":
        return Activity("training", peer.progress)
    return None
