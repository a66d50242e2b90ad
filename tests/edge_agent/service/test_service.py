"""The agent under a service manager: what it tells it, what it logs, and what installs it."""

import os
import shlex
import shutil
import signal

import pytest
import typer
from tests.helpers.fleet_processes import Child
from tests.helpers.installed_unit import made, unit
from tests.helpers.ports import free_port
from typer.testing import CliRunner

from fleetune.coordinator.broker.embedded_broker import EmbeddedBroker
from fleetune.edge_agent import cli
from fleetune.edge_agent.service.unit import SERVICE
from fleetune.protocols.systemd import environment, install

# A whole agent


def start_agent(tmp_path, port, **environment):
    command = ["fleetune.edge_agent.cli", "run", "--fleet", "f", "--device", "a", "--data", "digits"]
    command += ["--broker", f"127.0.0.1:{port}", "--state", str(tmp_path / "state")]
    return Child("agent", command, tmp_path / "agent.log", **environment)


def test_an_agent_is_ready_when_it_is_connected_lives_and_hangs(tmp_path, manager):
    port = free_port()
    agent = start_agent(tmp_path, port, NOTIFY_SOCKET=str(tmp_path / "notify"), WATCHDOG_USEC="1000000")
    try:
        assert "no program listens there" in manager.wait_for("STATUS=not connected")
        manager.wait_for("WATCHDOG=1")
        assert "READY=1" not in manager.heard
        with EmbeddedBroker.start(tmp_path / "broker", port=port):
            manager.wait_for("READY=1")
            for _ in range(4):
                manager.wait_for("WATCHDOG=1")
            assert any(line == "STATUS=connected; fleet f, device a" for line in manager.heard)
            agent.send(signal.SIGSTOP)
            manager.next(0.5)
            manager.drain()
            assert manager.next(3) is None, (
                "it hangs: systemd would hear nothing for three times its patience"
            )
            agent.send(signal.SIGCONT)
            manager.wait_for("WATCHDOG=1")
            agent.send(signal.SIGTERM)
            manager.wait_for("STOPPING=1")
            assert agent.wait() == 0
        assert manager.heard.count("READY=1") == 1
    finally:
        agent.kill()


def test_in_the_journal_lines_have_a_priority_and_no_time(tmp_path):
    (tmp_path / "agent.log").touch()
    log = (tmp_path / "agent.log").stat()
    agent = start_agent(tmp_path, free_port(), JOURNAL_STREAM=f"{log.st_dev}:{log.st_ino}")
    try:
        agent.wait_for("^<4>not connected: mqtt://127.0.0.1:")
        assert agent.stop() == 0
        assert agent.lines("^<6>left: stopped by a signal$")
    finally:
        agent.kill()


def test_a_terminal_gets_times_whatever_was_inherited(tmp_path):
    agent = start_agent(tmp_path, free_port(), JOURNAL_STREAM="1:1")
    try:
        agent.wait_for(r"^\d{4}-\d\d-\d\d .* WARNING not connected: ")
    finally:
        agent.kill()


# Its installation


def service(*words, **variables):
    return CliRunner().invoke(
        cli.app, ["service", *map(str, words)], env={"FLEETUNE_BROKER": None, **variables}
    )


GIVEN = ("--fleet", "f", "--broker", "mqtts://me:secret@edge", "--data", "npz:/data/x.npz")
needs_systemctl = pytest.mark.skipif(not shutil.which("systemctl"), reason="systemd is not installed")


@pytest.fixture
def program(monkeypatch, tmp_path):
    """An edge-agent that everybody may start, wherever pytest keeps its folders."""
    monkeypatch.setattr(install.Service, "executable", lambda _: "/opt/fleetune/bin/edge-agent")


@needs_systemctl
def test_installing_into_an_image_again_and_otherwise(tmp_path, program):
    first = service("install", "--into", tmp_path, *GIVEN)
    assert first.exit_code == 0, first.output
    assert first.output.count("changed  ") == 3
    settings = tmp_path / SERVICE.settings_file
    assert settings.stat().st_mode & 0o777 == 0o600
    unit = tmp_path / SERVICE.unit_file
    assert 'ExecStart="/opt/fleetune/bin/edge-agent" run' in unit.read_text()
    assert "secret" not in unit.read_text()
    wanted = tmp_path / "etc/systemd/system/multi-user.target.wants" / SERVICE.unit
    assert wanted.is_symlink()

    again = service("install", "--into", tmp_path)
    assert again.output.count("unchanged") == 3
    unit.unlink()
    before = os.umask(0o077)  # as root's may be
    try:
        service("install", "--into", tmp_path)
    finally:
        os.umask(before)
    assert unit.stat().st_mode & 0o777 == 0o644
    settings.chmod(0o644)
    other = service("install", "--into", tmp_path, "--fleet", "g", "--options", "--charging-only --nice 5")
    assert [line.split()[0] for line in other.output.splitlines()] == [
        "unchanged",
        "changed",
        "unchanged",
        "run",
    ]
    assert settings.stat().st_mode & 0o777 == 0o600
    assert environment.read(settings.read_text(), "agent.env") == {
        "FLEETUNE_FLEET": "g",
        "FLEETUNE_BROKER": "mqtts://me:secret@edge",
        "FLEETUNE_SOURCE": "npz:/data/x.npz",
        "FLEETUNE_OPTIONS": "--charging-only --nice 5",
    }

    gone = service("uninstall", "--into", tmp_path)
    assert gone.exit_code == 0, gone.output
    assert not unit.exists()
    assert not wanted.is_symlink()
    assert settings.exists()
    assert service("uninstall", "--into", tmp_path, "--purge").exit_code == 0
    assert not settings.exists()
    assert service("uninstall", "--into", tmp_path).exit_code == 0


def test_a_dry_run_shows_everything_but_the_password_and_does_nothing(tmp_path, program):
    shown = service("install", "--into", tmp_path, "--dry-run", *GIVEN)
    assert shown.exit_code == 0
    for part in ("WatchdogSec=", "mqtts://***@edge", "u fleetune", "would run systemctl"):
        assert part in shown.output
    assert "secret" not in shown.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--fleet", "a b"), "fleet 'a b'"),
        (("--broker", "http://x"), "it is not mqtt:// or mqtts://"),
        (("--data", "npz:mine.npz"), "a service has no current folder; give npz:/"),
        (("--fleet", "f"), "--broker, --data: needed"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(tmp_path, program, words, said):
    found = service("install", "--into", tmp_path, *words)
    assert found.exit_code == 2
    assert said in found.output
    assert found.output.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_an_older_systemd_is_not_told_what_it_does_not_know(tmp_path):
    new, old = (made(SERVICE, tmp_path, SERVICE.unit_file, systemd_version=version) for version in (254, 252))
    assert sorted(set(new.splitlines()) - set(old.splitlines())) == [
        "RestartMaxDelaySec=600",
        "RestartSteps=6",
    ]
    assert made(SERVICE, tmp_path, SERVICE.unit_file) == new, "an image's is not known"


@pytest.mark.parametrize("device", ["d", None])
def test_run_understands_the_unit_s_line(tmp_path, monkeypatch, device):
    if device is not None:
        monkeypatch.setenv("FLEETUNE_DEVICE", device)
    monkeypatch.setenv("FLEETUNE_FLEET", "f")
    (line,) = [
        line for line in unit(SERVICE, tmp_path).read_text().splitlines() if line.startswith("ExecStart=")
    ]
    line = line.replace("${FLEETUNE_SOURCE}", "digits")
    line = line.replace("$FLEETUNE_OPTIONS", "--charging-only --nice 5").replace("%S", "/var/lib")
    _, name, *words = shlex.split(line.partition("=")[2])
    command = typer.main.get_command(cli.app).commands[name]
    found = command.make_context(name, [*words, "--broker", "edge"]).params
    assert (found["fleet"], found["device"], found["charging_only"], found["nice"]) == ("f", device, True, 5)
    assert str(found["state"]) == "/var/lib/fleetune"
