"""edge-coordinator pause, resume, stop and start: commands for one run."""

from pathlib import Path
from typing import Literal

from fleetune.coordinator.cli.options import RunOrName, ServiceFolder
from fleetune.protocols.one_line import one_line_errors


def pause(run: RunOrName, service_folder: ServiceFolder = Path()) -> None:
    """Open no new round until `resume`. The open round is finished."""
    _apply("Pause", run, service_folder)


def resume(run: RunOrName, service_folder: ServiceFolder = Path()) -> None:
    """Let a paused run open rounds again."""
    _apply("Resume", run, service_folder)


def stop(run: RunOrName, service_folder: ServiceFolder = Path()) -> None:
    """Stop serving a run, as Ctrl-C does. It continues when it is served again, or after `start`."""
    _apply("Stop", run, service_folder)


def start(run: RunOrName, service_folder: ServiceFolder = Path()) -> None:
    """Let a service start a stopped run again."""
    _apply("Start", run, service_folder)


def _apply(name: Literal["Pause", "Resume", "Stop", "Start"], run: str, service_folder: Path) -> None:
    from fleetune.coordinator.commands import commands
    from fleetune.coordinator.service.service import folder_of

    command: commands.Command = getattr(commands, name)()
    with one_line_errors("edge-coordinator"):
        print(commands.apply(command, folder_of(run, service_folder)))
