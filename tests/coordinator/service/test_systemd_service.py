"""The coordinator's service under systemd: what it reports, what its runs inherit, what installs it."""

import shlex
import shutil
import signal
from pathlib import Path

import pytest
import typer
from tests.helpers.fleet_processes import Child, run_toml, wait_until
from tests.helpers.installed_unit import unit
from typer.testing import CliRunner

from fleetune.coordinator.cli import app
from fleetune.coordinator.service.service import OWN, read_statuses
from fleetune.coordinator.service.unit import SERVICE
from fleetune.protocols.systemd import environment, install
from fleetune.protocols.systemd.notify import ENVIRONMENT

SECRET = "s3cret-of-the-broker"

# A whole service


@pytest.fixture
def served(tmp_path, manager):
    """A service under `manager` with a run whose broker is not there, and a file that is wrong."""
    folder = tmp_path / "fleets"
    folder.mkdir()
    (folder / "one.toml").write_text(run_toml(name="one", devices=1))
    (folder / "wrong.toml").write_text("[run")
    (tmp_path / "service.log").touch()
    log = (tmp_path / "service.log").stat()
    child = Child(
        "service",
        ["fleetune.coordinator.cli", "service", str(folder)],
        tmp_path / "service.log",
        NOTIFY_SOCKET=str(tmp_path / "notify"),
        WATCHDOG_USEC="1000000",
        JOURNAL_STREAM=f"{log.st_dev}:{log.st_ino}",
        FLEETUNE_BROKER=f"mqtt://coordinator:{SECRET}@127.0.0.1:1",
    )
    yield folder, child
    child.kill()


def variables_of(pid):
    found = Path(f"/proc/{pid}/environ").read_bytes().decode()
    return {entry.partition("=")[0] for entry in found.split("\0")}


def test_a_service_is_ready_lives_hangs_and_stops(served, manager):
    folder, child = served
    manager.wait_for("READY=1")
    for _ in range(2):
        manager.wait_for("WATCHDOG=1")
    assert any(line == "STATUS=2 runs, 1 running, 1 wrong" for line in manager.heard), manager.heard
    (run,) = [note for note in read_statuses(folder) if note.state == "running"]
    assert not variables_of(run.pid) & set(ENVIRONMENT), "a run could speak for the service"
    child.send(signal.SIGSTOP)
    manager.next(0.5)
    manager.drain()
    assert manager.next(2.5) is None, "it hangs: systemd hears nothing for longer than its patience"
    child.send(signal.SIGCONT)
    manager.wait_for("WATCHDOG=1")
    child.send(signal.SIGTERM)
    manager.wait_for("STOPPING=1")
    assert child.wait() == 0
    assert manager.heard.count("READY=1") <= 1


def test_every_line_in_the_journal_has_a_priority_and_none_has_a_secret(served, tmp_path):
    folder, child = served
    run_log = folder / OWN / "one.log"
    wait_until(
        lambda: run_log.exists() and "127.0.0.1:1" in run_log.read_text(), "the run has named its broker"
    )
    assert child.stop() == 0
    journal = (tmp_path / "service.log").read_text()
    assert "<6>broker: mqtt://127.0.0.1:1" in journal
    assert "<4>wrong: wrong: " in journal
    assert all(line[:3] in ("<4>", "<6>") for line in journal.splitlines())
    assert SECRET not in journal + run_log.read_text()


# Its installation


def service(*words, **variables):
    return CliRunner().invoke(app, ["service", *map(str, words)], env={"FLEETUNE_BROKER": None, **variables})


@pytest.fixture
def _program(monkeypatch):
    """An edge-coordinator that everybody may start, wherever pytest keeps its folders."""
    monkeypatch.setattr(install.Service, "executable", lambda _: "/opt/fleetune/bin/edge-coordinator")


@pytest.mark.skipif(not shutil.which("systemctl"), reason="systemd is not installed")
@pytest.mark.usefixtures("_program")
def test_installing_into_an_image_again_and_otherwise(tmp_path):
    first = service("install", "--into", tmp_path)
    assert first.exit_code == 0, first.output
    assert first.output.count("changed  ") == 3
    text = (tmp_path / SERVICE.unit_file).read_text()
    assert 'ExecStart="/opt/fleetune/bin/edge-coordinator" service run %S/fleetune-coordinator' in text
    url = f"mqtts://coordinator:{SECRET}@edge"
    other = service(
        "install", "--into", tmp_path, "--options", "--ca /etc/fleetune/ca.pem", FLEETUNE_BROKER=url
    )
    assert [line.split()[0] for line in other.output.splitlines()] == [
        "unchanged",
        "changed",
        "unchanged",
        "run",
    ]
    settings = tmp_path / SERVICE.settings_file
    assert settings.stat().st_mode & 0o777 == 0o600
    assert environment.read(settings.read_text(), settings.name) == {
        "FLEETUNE_BROKER": url,
        "FLEETUNE_OPTIONS": "--ca /etc/fleetune/ca.pem",
    }
    shown = service("install", "--into", tmp_path, "--dry-run")
    assert "FLEETUNE_BROKER='mqtts://***@edge'" in shown.output
    assert SECRET not in other.output + shown.output
    assert service("uninstall", "--into", tmp_path, "--purge").exit_code == 0
    assert not [path for path in tmp_path.rglob("*") if path.is_file() or path.is_symlink()]


@pytest.mark.usefixtures("_program")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--broker", f"http://u:{SECRET}@x"), "it is not mqtt:// or mqtts://"),
        (("--options", "--bend 0.0.0.0"), "--options '--bend 0.0.0.0': No such option: --bend"),
        (("--options", "--port many"), "--options '--port many': "),
        (("--options", "it's"), "No closing quotation"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(tmp_path, words, said):
    found = service("install", "--into", tmp_path, *words)
    assert found.exit_code == 2
    assert said in found.output
    assert found.output.count("\n") == 1
    assert SECRET not in found.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [("run", "fleets"), ("fleets",), ("--bind", "::1", "fleets")])
def test_run_needs_no_name(words, monkeypatch):
    called = []
    monkeypatch.setattr(
        "fleetune.coordinator.service.start.serve_folder", lambda folder, **_: called.append(str(folder))
    )
    assert service(*words).exit_code == 0
    assert called == ["fleets"]


def test_help_lists_the_commands_of_a_service():
    for words in ((), ("--help",)):
        shown = service(*words).output
        assert all(name in shown for name in ("run", "install", "uninstall"))


def test_run_understands_the_unit_s_line(tmp_path):
    (line,) = [
        line for line in unit(SERVICE, tmp_path).read_text().splitlines() if line.startswith("ExecStart=")
    ]
    line = line.replace("$FLEETUNE_OPTIONS", "--bind 0.0.0.0").replace("%S", "/var/lib")
    _, group, name, *words = shlex.split(line.partition("=")[2])
    command = typer.main.get_command(app).commands[group].commands[name]
    found = command.make_context(name, words).params
    assert (str(found["folder"]), found["bind"]) == ("/var/lib/fleetune-coordinator", "0.0.0.0")
    assert f"/{SERVICE.state_folder}" == str(found["folder"])
