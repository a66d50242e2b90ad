"""The wheel as a user has it: installed, and called beside folders that have our packages' names."""

import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from tests.helpers.places import ROOT

from fleetune.protocols.version import VERSION

PACKAGES = ("protocols", "edge_agent", "coordinator", "tools", "firmware_profiles")
PATIENCE_S = 120
MODEL = """
from torch import nn
def net(input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))
"""


def run(*command, **options):
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
        **options,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built without a network: setuptools is here."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns(".*", "*.egg-info", "build", "runs", "__pycache__", "tests")
    source = shutil.copytree(ROOT, folder / "source", ignore=ignored)
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check")
    code, said = run(sys.executable, "-m", "pip", "wheel", "-q", *options, "-w", folder, source)
    assert code == 0, said
    return next(folder.glob("fleetune-*.whl"))


@pytest.fixture(scope="module")
def programs(wheel, tmp_path_factory):
    """The folder of the programs of an environment that has the wheel, and what it needs from ours."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    there = folder / ("Scripts" if sys.platform == "win32" else "bin")
    into = ("--python", there / "python", "install", "-q", "--no-deps", "--no-index")
    code, said = run(sys.executable, "-m", "pip", "--disable-pip-version-check", *into, wheel)
    assert code == 0, said
    code, own = run(there / "python", "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])")
    assert code == 0, own
    Path(own.strip(), "needed.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")
    return there


@pytest.fixture
def call(programs, tmp_path):
    """A program called where folders named like our packages say that they were imported."""
    for name in (*PACKAGES, "amqtt"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise RuntimeError('imported {name} of the user')\n")
    path = f"{programs}:/usr/bin:/bin:/usr/sbin"
    environment = {"PATH": path, "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}

    def called(program, *words):
        code, said = run(programs / program, *words, cwd=tmp_path, env=environment)
        assert "of the user" not in said, said
        assert "Traceback" not in said, said
        return code, said

    return called


def test_every_file_beside_the_sources_is_in_the_wheel(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        f"fleetune/{file.relative_to(ROOT)}"
        for package in PACKAGES
        for file in (ROOT / package).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    needed = {"tools/demo.toml", "tools/papers/kapc-mnist.toml", "protocols/bundle/files/mlp-1x8x8-10.bundle"}
    assert {f"fleetune/{name}" for name in needed} <= wanted
    assert wanted <= held, sorted(wanted - held)
    assert {name.split("/")[0] for name in held} <= {"fleetune", f"fleetune-{VERSION}.dist-info"}


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        ("edge-sim --version", f"fleetune {VERSION}"),
        ("edge-coordinator --version", f"fleetune {VERSION}"),
        ("edge-agent --version", f"fleetune {VERSION}"),
        ("edge-sim paper", "kapc-mnist"),
        ("edge-sim link presets", "4g"),
        ("edge-coordinator serve --help", "RUN_FILE"),
        ("edge-coordinator export lenet5 --input 1x28x28 --classes 10", "lenet5"),
        ("edge-agent boards", "raspberry-pi-5"),
        ("edge-agent profile --json", "memory"),
    ],
)
def test_commands_work_beside_folders_of_our_packages_names(call, command, wanted):
    code, said = call(*command.split())
    assert code == 0, said
    assert wanted in said


def test_the_doctor_finds_the_trainers(call):
    code, said = call("edge-agent", "doctor", "--json", "--data", "digits")
    assert code in (0, 1), said  # there is no broker
    assert '"trainer"' in said


def test_a_run_with_workers_finds_a_users_own_model_beside_such_folders(call, programs, tmp_path):
    (tmp_path / "mine.py").write_text(MODEL)
    demo = next(programs.parent.rglob("tools/demo.toml"))
    small = ("--set", "run.rounds=1", "--set", "model.name=mine:net", "--workers", "2")
    code, said = call("edge-sim", "run", demo, *small)
    assert code == 0, said
    assert (tmp_path / "runs" / "demo" / "summary.json").is_file()


@pytest.mark.fleet
def test_the_demo_runs_beside_such_folders(call, tmp_path):
    code, said = call("python", "-P", "-m", "fleetune.tools.demo")
    assert code == 0, said
    assert "what each device gained" in said
    assert (tmp_path / "runs" / "demo" / "report.html").is_file()
