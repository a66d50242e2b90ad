"""Commands: each changes one request, can be carried as JSON, and says what follows from it."""

from typing import get_args

import msgspec
import pytest

from fleetune.coordinator.commands.commands import (
    Command,
    Forget,
    Pause,
    Resume,
    Start,
    Stop,
    apply,
    with_command,
    withdraw_forget,
    withdraw_stop,
)
from fleetune.coordinator.commands.control_file import Control, read_control, write_control


@pytest.mark.parametrize("kind", get_args(Command))
def test_every_command_can_be_carried_as_json_and_applied(kind, tmp_path):
    command = kind(*(["pi"] if kind is Forget else []))
    data = msgspec.json.encode(command)
    assert msgspec.json.decode(data, type=Command) == command
    assert str(tmp_path) in apply(command, tmp_path)


def test_a_command_changes_its_own_request_alone():
    for control in (Control(paused, stopped) for paused in (False, True) for stopped in (False, True)):
        assert with_command(control, Pause()) == Control(True, control.stopped)
        assert with_command(control, Resume()) == Control(False, control.stopped)
        assert with_command(control, Stop()) == Control(control.paused, True)
        assert with_command(control, Start()) == Control(control.paused, False)


def test_requests_to_forget_add_up_and_are_withdrawn_one_by_one(tmp_path):
    for device in ("b", "a", "b"):
        apply(Forget(device), tmp_path)
    apply(Pause(), tmp_path)
    assert read_control(tmp_path) == Control(paused=True, forget=("a", "b"))
    withdraw_forget(tmp_path, "a")
    withdraw_forget(tmp_path, "a")
    assert read_control(tmp_path) == Control(paused=True, forget=("b",))


def test_serving_a_run_withdraws_stop_and_nothing_else(tmp_path):
    write_control(tmp_path, Control(paused=True, stopped=True))
    withdraw_stop(tmp_path)
    assert read_control(tmp_path) == Control(paused=True)


def test_what_follows_from_a_command_is_said(tmp_path):
    assert apply(Pause(), tmp_path).endswith("until it is resumed; no coordinator is at it")
    assert apply(Resume(), tmp_path).endswith("rounds open when they are due; no coordinator is at it")
    assert apply(Stop(), tmp_path).endswith(": stopped")
