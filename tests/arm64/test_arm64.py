"""An agent as it is installed on arm64 boards: the losses it trains with, and a fleet that it joins.

Most of it needs root, and the environment variable FLEETUNE_ARM64_ROOT that names a folder in which
`python -m tests.arm64 make` and `install` have been; see docs/install/arm64-emulation.md.
"""

import filecmp
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.arm64 import debian
from tests.arm64.enter import VENV, command
from tests.arm64.processor import PROCESSORS, cpuinfo, describe_cores
from tests.helpers import ten_steps
from tests.helpers.fleet_processes import ROOT, Fleet, expected, run_toml

from fleetune.edge_agent.probes import board_identity

CPUS = "max", "cortex-a53"  # all that qemu can, and the oldest processor among our boards'


@pytest.fixture
def arm64():
    """The folder of an arm64 root that has this checkout installed."""
    if "FLEETUNE_ARM64_ROOT" not in os.environ:
        pytest.skip(
            "no arm64 system: FLEETUNE_ARM64_ROOT names a folder made by `python -m tests.arm64 make`"
        )
    if os.geteuid() != 0:
        pytest.skip("an arm64 root can be entered by root only")
    root = Path(os.environ["FLEETUNE_ARM64_ROOT"])
    assert debian.is_ready(root), f"{root} is not finished: python -m tests.arm64 make {root}"
    installed = next(root.glob(f"{VENV[1:]}/lib/python3*/site-packages"))
    sources = [path for part in ("edge_agent", "protocols") for path in ROOT.glob(f"{part}/**/*.py")]
    for path in sources:
        there = installed / path.relative_to(ROOT)
        assert there.exists(), f"{there} is missing: python -m tests.arm64 install {root}"
        assert filecmp.cmp(path, there, shallow=False), f"{there}: python -m tests.arm64 install {root}"
    return root


@pytest.mark.parametrize("cpu", CPUS)
def test_losses_of_lenet_are_those_of_x86(arm64, tmp_path, cpu):
    script = shutil.copy(ten_steps.__file__, tmp_path)
    words = command(arm64, "python3", str(script), cpu=cpu, folders=[tmp_path])
    inside = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert inside.returncode == 0, inside.stderr
    found, wanted = json.loads(inside.stdout), ten_steps.ten_losses()
    assert wanted[-1] < wanted[0] - 0.5
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.fleet
@pytest.mark.parametrize("cpu", CPUS)
def test_an_agent_inside_trains_with_a_fleet(arm64, tmp_path, tmp_path_factory, cpu):
    """Two of three agents run here with torch, one inside without: they end where the simulation does."""
    toml = run_toml()
    with Fleet(tmp_path, toml) as fleet:
        fleet.start_coordinator()
        inside, *others = fleet.shares
        enter = shlex.join(command(arm64, "edge-agent", cpu=cpu, folders=[tmp_path]))
        fleet.start_agent(inside, prefix=("sh", "-c", f'shift 2; exec {enter} "$@"'), trainer="onnx")
        for device in others:
            fleet.start_agent(device)
        fleet.wait_finished()
        assert not fleet.agents[inside].lines("WARNING|ERROR")
        found = fleet.outcome()
    wanted = expected(toml, tmp_path_factory.mktemp("simulated"))
    assert found.traffic[inside][-1] == wanted.traffic[inside][-1] == 3  # updates, one a round
    for device, model in wanted.personal.items():
        near = np.frombuffer(found.personal[device], np.float32)
        np.testing.assert_allclose(near, np.frombuffer(model, np.float32), rtol=0, atol=1e-4)


def test_programs_inside_are_told_the_processor_they_get(tmp_path):
    processor = PROCESSORS["cortex-a53"]
    describe_cores(tmp_path / "sys/devices/system/cpu", processor, 3)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(cpuinfo(processor, 3))
    assert board_identity.processor(tmp_path) == "Cortex-A53"
    assert board_identity.num_cores(tmp_path) == 3
    assert processor.id_register == 0x410FD034  # MIDR_EL1 of a Cortex-A53 r0p4, from Arm's manual


def test_a_second_try_starts_over_with_what_was_fetched(tmp_path):
    fetched = tmp_path / debian.FETCHED / "libc6.deb"
    fetched.parent.mkdir(parents=True)
    for path in (fetched, tmp_path / debian.MARK, tmp_path / "var/half", tmp_path / debian.LOG):
        path.write_text("x")
    (tmp_path / "bin").symlink_to("/usr/bin")
    debian._clear(tmp_path)
    assert sorted(tmp_path.rglob("*.*")) == [tmp_path / debian.MARK, fetched]
    assert not (tmp_path / "bin").is_symlink()
    assert not (tmp_path / "var/half").exists()


@pytest.mark.parametrize("words", [["make", "/etc"], ["install", "nowhere"], ["run", "nowhere", "--", "ls"]])
def test_a_mistake_is_one_line(words):
    tool = [sys.executable, "-m", "tests.arm64", *words]
    done = subprocess.run(tool, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("tests.arm64: ")
