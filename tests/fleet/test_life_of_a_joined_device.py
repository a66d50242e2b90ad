"""The whole life of a joined device with real processes: serve, invite, join, run, renew, revoke.

No password is typed and no file copied. Afterwards no secret stands in a log, a list of processes or a file
that others can read.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.helpers.fleet_processes import Child, run_toml
from tests.helpers.places import ROOT

from fleetune.edge_agent.joining.joined_fleet import joined_fleet

pytestmark = [
    pytest.mark.fleet,
    pytest.mark.skipif(not shutil.which("mosquitto", path="/usr/sbin:/usr/bin"), reason="needs mosquitto"),
]


class CommandLines:
    """All arguments of processes that were seen while this ran."""

    def __init__(self):
        self.seen, self._done = set(), threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self):
        while not self._done.wait(0.01):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    self.seen.add(path.read_bytes())
                except OSError:
                    continue

    def stop(self):
        self._done.set()
        self._thread.join()


def command(program, *words, **environment):
    return subprocess.run(
        [sys.executable, "-m", f"fleetune.{program}.cli", *map(str, words)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def imports_of(pid):
    """Files of libraries that a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text()


def secrets_of(folder):
    """Parts of the private keys in a folder."""
    found = set()
    for path in folder.rglob("*"):
        if path.is_file():
            text = path.read_bytes().decode("latin-1")
            # the first line is the same for all keys of one kind
            found |= set(re.findall(r"PRIVATE KEY-----(?:\\n|\s)[\w+/]+(?:\\n|\s)([\w+/]{40})", text))
    return found


def test_a_device_joins_runs_renews_and_is_revoked(tmp_path):
    os.umask(os.umask(0o022))
    (tmp_path / "run.toml").write_text(run_toml(devices=1, start_with=1, rounds=200))
    runs, state = tmp_path / "runs", tmp_path / "state"
    lines = CommandLines()
    serve = ["fleetune.coordinator.cli", "serve", str(tmp_path / "run.toml"), "--runs", str(runs)]
    coordinator = Child("coordinator", [*serve, "--bind", "0.0.0.0", "--port", "0"], tmp_path / "c.log")
    agent = None
    try:
        coordinator.wait_for("edge-coordinator invite")
        invited = command("coordinator", "invite", "--runs", runs, "--host", "127.0.0.1", "--json")
        assert invited.returncode == 0, invited.stderr
        line = json.loads(invited.stdout)["line"]
        code = line.split("/")[-2]
        joining = command("edge_agent", "join", "--state", state, "--device", "pi", FLEETUNE_JOIN=line)
        assert joining.returncode == 0, joining.stderr
        run = ["fleetune.edge_agent.cli", "run", "--data", "digits", "--state", str(state)]
        agent = Child("agent", run, tmp_path / "a.log")
        agent.wait_for("connected; fleet fleet, device")
        coordinator.wait_for("round 2")
        assert "cryptography" not in imports_of(agent.pid)
        before = joined_fleet(state).credentials.key
        rotated = command("coordinator", "rotate-authority", "--runs", runs)
        assert rotated.returncode == 0, rotated.stderr
        agent.wait_for("certificate renewed")
        assert joined_fleet(state).credentials.key not in ("", before)
        agent.stop()
        agent = Child("agent", run, tmp_path / "a.log")
        agent.wait_for("connected; fleet fleet, device")
        revoked = command("coordinator", "revoke", "pi", "--runs", runs)
        assert revoked.returncode == 0, revoked.stderr
        agent.wait_for("this device's certificate is revoked")
        secrets = {code} | secrets_of(state) | secrets_of(runs / ".fleets")
        assert len(secrets) >= 4, "code, and keys of device, server and authority"
    finally:
        for child in (agent, coordinator):
            if child is not None:
                child.kill()
        lines.stop()
    said = [*(one.decode("latin-1") for one in lines.seen), joining.stdout, joining.stderr]
    said += [(tmp_path / name).read_text() for name in ("a.log", "c.log")]
    for path in tmp_path.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_mode & 0o077:
            said.append(path.read_bytes().decode("latin-1"))
    assert not [secret for secret in secrets for text in said if secret in text]
