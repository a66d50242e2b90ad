"""What a program reports to its service manager, and what it logs there."""

import logging
import os
import subprocess
import sys

import pytest
from tests.helpers.places import ROOT
from tests.helpers.service_manager import Manager

from fleetune.protocols.errors import SettingError
from fleetune.protocols.systemd import environment
from fleetune.protocols.systemd.logs import JournalFormatter
from fleetune.protocols.systemd.notify import Notifier


def test_every_message_arrives_and_ready_is_said_once(tmp_path, manager):
    told = Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify")})
    told.ready()
    told.ready()
    told.status("round 3: training\nand a line nobody sees")
    told.stopping()
    assert [manager.next(1) for _ in range(4)] == ["READY=1", "STATUS=round 3: training", "STOPPING=1", None]
    assert told.wake_at is None, "without a watchdog nobody needs to wake up"


def test_an_abstract_socket():
    name = f"@fleetune-test-{os.getpid()}"
    manager = Manager(name)
    Notifier({"NOTIFY_SOCKET": name}).ready()
    assert manager.next() == "READY=1"
    manager.close()


def test_signs_of_life_come_twice_in_the_watchdog_s_patience(tmp_path, manager):
    told = Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "30000000"})
    for now in (100.0, 101.0, 114.9, 115.0, 129.9, 200.0):
        told.beat(now)
        manager.heard.append(now)
        while manager.next(0) is not None:
            pass
    assert manager.heard == [
        *(100.0, "WATCHDOG=1", 101.0, 114.9, 115.0, "WATCHDOG=1", 129.9, 200.0, "WATCHDOG=1")
    ]
    assert told.wake_at == 215.0


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WATCHDOG_USEC": "1000"},
        {"NOTIFY_SOCKET": "/nowhere"},
        {"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "soon"},
        {"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "0"},
        {"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"},
    ],
)
def test_where_nobody_listens_nothing_is_due_and_nothing_fails(environment):
    told = Notifier(environment)
    told.ready()
    told.beat(1.0)
    told.stopping()
    assert told.wake_at is None


def test_a_manager_that_is_gone_does_not_stop_the_watchdog_s_beats():
    told = Notifier(
        {"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "2000000", "WATCHDOG_PID": str(os.getpid())}
    )
    told.beat(5.0)
    assert told.wake_at == 6.0


def test_programs_that_we_run_do_not_speak_for_us(tmp_path, manager):
    code = (
        "import os, subprocess, sys\n"
        "from fleetune.protocols.systemd.notify import service_manager\n"
        "service_manager()\n"
        "service_manager().ready();"
        "subprocess.run([sys.executable, '-c', 'import os; print(sorted(os.environ))'])"
    )
    environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "9", "STAYS": "here"}
    told = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert manager.next() == "READY=1"
    assert "STAYS" in told.stdout
    assert "NOTIFY_SOCKET" not in told.stdout
    assert "WATCHDOG" not in told.stdout


def test_every_line_of_a_traceback_has_its_priority():
    try:
        environment.read("first\nsecond", "agent.env")
    except SettingError:
        record = logging.LogRecord("x", logging.ERROR, "", 0, "declined", (), sys.exc_info())
    lines = JournalFormatter().format(record).splitlines()
    assert len(lines) > 4
    assert all(line.startswith("<3>") for line in lines)
    for level, priority in ((logging.DEBUG, 7), (logging.INFO, 6), (logging.CRITICAL, 2)):
        record = logging.LogRecord("x", level, "", 0, "message %d", (1,), None)
        assert JournalFormatter().format(record) == f"<{priority}>message 1"
