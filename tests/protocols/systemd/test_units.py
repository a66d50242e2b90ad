"""The units of coordinator and agent, as systemd judges them."""

import shutil
import subprocess

import pytest
from tests.helpers.installed_unit import made, unit

from fleetune.coordinator.service.unit import SERVICE as COORDINATOR
from fleetune.edge_agent.service.unit import SERVICE as AGENT

pytestmark = pytest.mark.parametrize("service", [COORDINATOR, AGENT], ids=["coordinator", "agent"])
needs_systemd = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")


@needs_systemd
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path, service):
    command = ["systemd-analyze", "verify", "--man=no", unit(service, tmp_path)]
    verified = subprocess.run(command, capture_output=True, text=True, check=False)
    assert [line for line in verified.stderr.splitlines() if service.unit in line] == []
    assert verified.returncode == 0


@needs_systemd
def test_systemd_finds_it_well_locked_up(tmp_path, service):
    options = ("--offline=true", "--threshold=20", "--no-pager")
    command = ["systemd-analyze", "security", *options, unit(service, tmp_path)]
    judged = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unrecognized option" in judged.stderr:
        pytest.skip("this systemd cannot judge a unit offline")
    assert judged.returncode == 0, judged.stdout  # an exposure of 2.0 of 10 at most


@pytest.mark.skipif(not shutil.which("systemd-sysusers"), reason="systemd is not installed")
def test_the_user_is_made(tmp_path, service):
    (tmp_path / "etc/sysusers.d").mkdir(parents=True)
    (tmp_path / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    (tmp_path / "etc/group").write_text("root:x:0:\nvideo:x:44:\n")
    (tmp_path / service.user_file).write_text(made(service, tmp_path, service.user_file))
    subprocess.run(["systemd-sysusers", f"--root={tmp_path}"], check=True, capture_output=True)
    (user,) = [line for line in (tmp_path / "etc/passwd").read_text().splitlines() if "fleetune" in line]
    assert user.split(":")[5] == f"/{service.state_folder}"
    assert ("video:x:44:fleetune" in (tmp_path / "etc/group").read_text()) == (service is AGENT)
