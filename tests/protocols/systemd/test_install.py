"""A service's settings, its program, and the commands that install it."""

import subprocess
import sys
import tempfile
from functools import partialmethod
from pathlib import Path

import pytest

from fleetune.protocols.errors import SettingError, StoreError
from fleetune.protocols.systemd import commands, environment, install
from fleetune.protocols.systemd.install import Service

SERVICE = Service("edge-agent", "agent", "fleetune", "fleetune.edge_agent.service")

AWKWARD = 'mqtts://me:p%40ss$HOME`id`";#&=* @edge'


def test_settings_are_changed_where_they_are_and_the_rest_stays():
    text = "# mine\nPYTHONPATH=/srv/ours\nFLEETUNE_FLEET=old\n"
    found = environment.changed(text, {"FLEETUNE_FLEET": "new", "FLEETUNE_BROKER": AWKWARD}, "agent.env")
    assert found.startswith("# mine\nPYTHONPATH=/srv/ours\n")
    assert environment.read(found, "agent.env") == {
        "PYTHONPATH": "/srv/ours",
        "FLEETUNE_FLEET": "new",
        "FLEETUNE_BROKER": AWKWARD,
    }
    assert environment.changed(found, {"FLEETUNE_FLEET": "new"}, "agent.env") == found


def test_a_shell_reads_the_same(tmp_path):
    (tmp_path / "agent.env").write_text(
        environment.changed("", {"A": AWKWARD, "B": '--policy "/a b"', "C": ""}, "agent.env")
    )
    told = subprocess.run(
        ["bash", "-c", f'. {tmp_path}/agent.env; printf "%s\\n" "$A" "$B" "$C"'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.splitlines() == [AWKWARD, '--policy "/a b"', ""]


@pytest.mark.parametrize("value", ["it's", "a\\b", "two\nlines"])
def test_what_systemd_and_shells_read_differently_is_refused(value):
    with pytest.raises(SettingError, match="FLEETUNE_BROKER"):
        environment.changed("", {"FLEETUNE_BROKER": value}, "agent.env")


@pytest.mark.parametrize("line", ["FLEETUNE_FLEET", "A B=1", "A=one two", "A='open"])
def test_a_line_that_is_no_setting_is_named(line):
    with pytest.raises(SettingError, match="line 2"):
        environment.read(f"# mine\n{line}\n", "agent.env")


def test_a_program_that_the_service_s_user_cannot_start_is_refused():
    with tempfile.TemporaryDirectory() as name:  # pytest keeps its own closed to others
        there, home = Path(name), Path(name, "home")
        there.chmod(0o755)
        home.mkdir(mode=0o700)
        with pytest.raises(SettingError, match="there is no"):
            SERVICE.executable(there / "python")
        for folder in (there, home):
            (folder / "edge-agent").touch()
        (there / "python").touch()
        assert SERVICE.executable(there / "python") == there / "edge-agent"
        with pytest.raises(SettingError, match=f"may not enter {home}; install into a folder that is open"):
            SERVICE.executable(home / "python")
        (there / "python").unlink()
        (there / "python").symlink_to(home / "python")
        with pytest.raises(SettingError, match=f"{home}/python: user fleetune may not enter {home};"):
            SERVICE.executable(there / "python")


@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_dry_run_and_a_card_need_no_program_that_starts_here(tmp_path, capsys, monkeypatch, elsewhere):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))  # there is no program next to it
    monkeypatch.setattr(Service, "executable", partialmethod(Service.executable, tmp_path / "python"))
    monkeypatch.setattr(commands, "run", lambda _: None)
    into = tmp_path if elsewhere else Path("/")
    commands.install(SERVICE, {}, into=into, dry_run=not elsewhere)
    shown = capsys.readouterr()
    assert "note: the service could not start from here: there is no" in shown.err
    assert "systemctl" in shown.out
    with pytest.raises(SettingError, match="there is no"):
        commands.install(SERVICE, {}, into=Path("/"), dry_run=False)


def test_a_command_that_fails_is_one_line():
    with pytest.raises(StoreError, match="false failed: exit code 1"):
        install.run(("false",))
    with pytest.raises(StoreError, match="is this a system with systemd"):
        install.run(("no-such-systemctl",))
