"""Console output of `edge-coordinator serve`: a live view or one line for each round, then the report."""

import time
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.live import Live

from fleetune.coordinator.extensions.releases import rollout_in
from fleetune.coordinator.metrics.personal_scores import with_personal
from fleetune.coordinator.metrics.summary import SUMMARY, Summary, encoded
from fleetune.coordinator.queries.fleet_devices import FleetDevices
from fleetune.coordinator.queries.run_status import DeviceStatus, StatusReader
from fleetune.coordinator.queries.waiting import Impatience, abandoned_line, missing_from, schedule_reason
from fleetune.coordinator.reports.live import LiveView, plain_line
from fleetune.coordinator.reports.report import summary_of, write_report
from fleetune.coordinator.reports.tables import device_table, fleet_table, registry_table, run_table
from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.coordinator.run.round_journal import ROUNDS
from fleetune.coordinator.run.run_clock import schedule_of
from fleetune.coordinator.run.run_events import (
    Moment,
    Notice,
    RoundAbandoned,
    RoundClosed,
    RunBegan,
    RunEvent,
    RunLeft,
)
from fleetune.coordinator.run.stored_run import Run, mark_finished, save_shared_model
from fleetune.coordinator.trackers.follow import Following
from fleetune.protocols.files import write_atomically
from fleetune.protocols.settings.run_settings import simulated_keys


class LogLines:
    """Prints a run line by line: one line for each round, and one if a round waits for devices for long.

    `serve` uses this class if its output is not a terminal.

    Args:
        run: the run.
        console: the console to print on.
    """

    def __init__(self, run: Run, console: Console) -> None:
        self._run = run
        self._console = console
        self._impatience = Impatience()
        self._schedule = schedule_of(run.settings.schedule)

    def observe(self, event: RunEvent) -> None:
        """Handle one event."""
        match event:
            case Notice(line):
                say(line, self._console)
            case RoundAbandoned():
                say(abandoned_line(event, self._run.controller.engine_state), self._console)
            case RoundClosed(record):
                self._closed(record)
            case Moment(now):
                state, settings = self._run.controller.engine_state, self._run.settings.round
                scheduled = schedule_reason(state, self._schedule, now, countdown=False)
                if line := self._impatience.line(state, settings, now, scheduled):
                    say(line, self._console)

    def _closed(self, record: RoundRecord) -> None:
        state, settings = self._run.controller.engine_state, self._run.settings
        absent = missing_from(record, state, settings.round)
        line = plain_line(record, settings) + (f"  missing: {absent}" if absent else "")
        say(line, self._console)


class LiveScreen:
    """Shows a run on a terminal: the live view, with messages above it.

    Args:
        run: the run.
        console: a terminal.
    """

    def __init__(self, run: Run, console: Console) -> None:
        self._run = run
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._reader = StatusReader(run.settings, run.enrolment.spec.num_parameters)

    def observe(self, event: RunEvent) -> None:
        """Handle one event."""
        match event:
            case RunBegan():
                for record in event.closed:
                    self._reader.add(record)
                self._live.start()
            case Notice(line):
                say(line, self._console)
            case RoundAbandoned():
                say(abandoned_line(event, self._run.controller.engine_state), self._console)
            case RoundClosed(record):
                self._reader.add(record)
            case Moment():
                self._draw(event)
            case RunLeft():
                self._live.stop()

    def _draw(self, moment: Moment) -> None:
        controller = self._run.controller
        state, ledger = controller.engine_state, controller.ledger
        status = self._reader.status(
            state,
            ledger,
            moment.now,
            rollout=rollout_in(self._run.store, self._run.settings.adoption),
            problem=moment.problem or "",
        )
        devices = self._reader.devices(state, ledger, moment.activities())
        self._live.update(LiveView(status, devices), refresh=True)


def say(line: str, console: Console) -> None:
    """Print a line with the time; on a terminal it appears above the live view."""
    at = time.strftime("%Y-%m-%d %H:%M:%S")
    console.print(f"{at} {line}", highlight=False, markup=False, soft_wrap=True)


def print_start(run: Run, fleet: str, console: Console) -> None:
    """Print the run and its fleet, and warn of settings that have an effect only in simulations."""
    again = "goes on" if run.resumed else "begins"
    say(f"run {run.enrolment.run} {again}; fleet {fleet}; folder {run.folder}", console)
    if ignored := simulated_keys(run.settings):
        say(f"ignored, because only simulations use them: {', '.join(ignored)}", console)


def finish(run: Run, reason: str | None, console: Console, following: Following | None = None) -> None:
    """Write the report of a finished run, or print how to continue a stopped run.

    Trackers that follow the run receive its summary. A stopped open-ended run also gets its summary.json,
    because it has no last round after which to write one. If writing the report is interrupted, the next
    `edge-coordinator serve` of the run writes it.

    Args:
        run: the run.
        reason: why the run is finished; None if it was stopped.
        console: the console to print on.
        following: the trackers that follow the run.
    """
    run.processor.note()
    if reason is None:
        if run.settings.run.is_open:
            write_atomically(run.folder / SUMMARY, encoded(summary_of(run, simulated=False)), mode=None)
        say("stopped; the same command goes on with the run", console)
        return
    say(f"finished: {reason}", console)
    try:
        summary, files = report_run(run, console)
    except KeyboardInterrupt:
        say("stopped in its report; the same command writes it", console)
        return
    mark_finished(run)
    if following is not None:
        following.finish(summary, run.controller.records(), files)


def report_run(run: Run, console: Console | None = None, *, live: bool = False) -> tuple[Summary, list[Path]]:
    """Write a run's report in its present state, print its tables, and return the summary and the files.

    Args:
        run: the run.
        console: the console to print on.
        live: True if another process serves the run and writes rounds.jsonl itself.
    """
    console = console or Console()
    summary, records = summary_of(run, simulated=False), run.controller.records()
    members = run.controller.members
    boards = {device: one.report.board for device, one in members.items() if one.report}
    left_out = (ROUNDS,) if live else ()
    files = write_report(run.folder, run.settings, summary, records, boards=boards, left_out=left_out)
    files.append(save_shared_model(run))
    shown = with_personal(summary, records)
    console.print(device_table(shown, boards=boards))
    console.print(run_table(shown))
    for file in files:
        if file.suffix in (".html", ".json", ".safetensors"):
            console.print(f"  {file}", highlight=False, markup=False, soft_wrap=True)
    return summary, files


def print_fleet(found: FleetDevices, *, with_run: bool) -> None:
    """Print the devices of a fleet; `with_run`: also what its run knows about them."""
    console = Console()
    console.print(registry_table(found.devices, time.time(), console.width))
    if found.run is not None and with_run:
        print_devices(one for one in found.devices if one.board or one.doing != "away")
    elif found.run is not None:
        print(f"board, ratio and conditions in {found.run}: --run")


def print_devices(devices: Iterable[DeviceStatus]) -> None:
    """Print a run's devices, and those whose updates counted less than others, or not at all."""
    shown = list(devices)
    Console().print(fleet_table(shown))
    for one in shown:
        if times := one.refused.get("share-cut"):
            print(f"{one.identity}: {times} updates counted as fewer samples than claimed (round.max_share)")
        if times := one.refused.get("quarantined"):
            print(f"{one.identity}: {times} updates did not count (round.quarantine)")
