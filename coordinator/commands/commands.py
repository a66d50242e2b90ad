"""Commands of a run's owner as one union, and the function that applies a command to a run's folder.

The command line creates them. Another interface, such as HTTP, decodes a `Command` from JSON and calls
`apply`.
"""

import time
from pathlib import Path
from typing import assert_never

from msgspec import Struct
from msgspec.structs import replace

from fleetune.coordinator.commands.control_file import Control, read_control, write_control
from fleetune.coordinator.store.folder_lock import check_unclaimed, is_claimed

REMOVAL_S = 60.0  # longer than a removal takes


class Pause(Struct, frozen=True, tag_field="command", tag="pause"):
    """Command: open no new round until `Resume`. The open round still finishes."""


class Resume(Struct, frozen=True, tag_field="command", tag="resume"):
    """Command: open rounds again after `Pause`."""


class Stop(Struct, frozen=True, tag_field="command", tag="stop"):
    """Command: stop serving the run. It continues when it is served or started again."""


class Start(Struct, frozen=True, tag_field="command", tag="start"):
    """Command: withdraw `Stop`, so that a service starts the run again."""


class Forget(Struct, frozen=True, tag_field="command", tag="forget"):
    """Command: remove a device from the run. A coordinator that serves the run does it at once, between two
    steps of the run; otherwise it is done when the run is opened next.
    """

    device: str


Command = Pause | Resume | Stop | Start | Forget


def apply(command: Command, folder: Path) -> str:
    """Apply a command to the run in a folder; return one line that describes the effect.

    Raises:
        StoreError: the control file cannot be read or written.
    """
    control = with_command(read_control(folder), command)
    write_control(folder, control)
    running = is_claimed(folder)
    if control.stopped:
        return f"{folder} is being stopped; serve it again to go on" if running else f"{folder}: stopped"
    what = "no new round opens until it is resumed" if control.paused else "rounds open when they are due"
    return f"{folder}: {what}" + ("" if running else "; no coordinator is at it")


def with_command(control: Control, command: Command) -> Control:
    """Return the pending requests after a command is applied to `control`."""
    match command:
        case Pause():
            return replace(control, paused=True)
        case Resume():
            return replace(control, paused=False)
        case Stop():
            return replace(control, stopped=True)
        case Start():
            return replace(control, stopped=False)
        case Forget(device):
            return replace(control, forget=tuple(sorted({*control.forget, device})))
    assert_never(command)


def withdraw_forget(folder: Path, device: str) -> None:
    """Withdraw `Forget`, because the device was removed.

    Raises:
        StoreError: the control file cannot be read or written.
    """
    control = read_control(folder)
    if device in control.forget:
        write_control(folder, replace(control, forget=tuple(one for one in control.forget if one != device)))


def wait_for_removal(folder: Path) -> None:
    """Wait while another process removes a device from the run, which holds the run's lock for a moment.

    Raises:
        StoreError: the control file cannot be read.
    """
    give_up_at = time.monotonic() + REMOVAL_S
    while is_claimed(folder) and read_control(folder).forget and time.monotonic() < give_up_at:
        time.sleep(0.1)


def check_free(folder: Path) -> None:
    """Check that no other process holds the run's folder, apart from one that removes a device.

    Raises:
        StoreError: another process holds it.
    """
    wait_for_removal(folder)
    check_unclaimed(folder)


def withdraw_stop(folder: Path) -> None:
    """Withdraw `Stop`, because the run is served again.

    Raises:
        StoreError: the control file cannot be read or written.
    """
    control = read_control(folder)
    if control.stopped:
        write_control(folder, with_command(control, Start()))
