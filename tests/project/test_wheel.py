"""The wheel as a user has it: installed, and called beside folders that have our packages' names."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from tests.helpers.nightly import sooner
from tests.helpers.places import ROOT

PACKAGES = ("protocols", "edge_agent", "coordinator", "tools", "firmware_profiles")
PATIENCE_S = 120
VERSION = "0.2.0.dev0"  # of a copy without git
MODEL = """
from torch import nn
def net(input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))
"""

DATA = """
import numpy as np
def load():
    y = np.arange(600) % 10
    return np.eye(10, 64)[y].reshape(-1, 1, 8, 8), y
"""
METHOD = """
from dataclasses import dataclass
from fleetune import FitPlan, ModelAveraging, Patch, PersonalModel, Update
@dataclass(frozen=True)
class Own(ModelAveraging):
    def work(self, state, task, trainer, budget, key):
        fit = trainer.fit(task.patch.apply(state.weights, self.spec), FitPlan(), key)
        sent = Patch.of(fit.weights, self.shared, self.spec)
        return PersonalModel(fit.weights), Update(sent, trainer.num_samples)
"""
TYPED = """
from pathlib import Path
import fleetune
from fleetune import Key
reveal_type(fleetune.simulate(fleetune.read_run(Path("run.toml"))))
reveal_type(Key.of("own").child("draw"))
board: int = fleetune.load_board("raspberry-pi-5")
from fleetune import import_module
"""


OURS = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run(*command, env=OURS, **options):
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
        env=env,
        **options,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A checkout."""
    folder = tmp_path_factory.mktemp("checkout") / "fleetune"
    ignored = shutil.ignore_patterns(".*", "*.egg-info", "build", "runs", "__pycache__", "tests")
    return shutil.copytree(ROOT, folder, symlinks=True, ignore=ignored)


def build(what, source, into):
    """Built without a network: setuptools is here."""
    script = f"from setuptools.build_meta import build_{what} as build; import sys; build(sys.argv[1])"
    code, said = run(sys.executable, "-c", script, into, cwd=source)
    assert code == 0, said
    return next(path for path in into.iterdir() if path.is_file())


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


def install(folder, *what):
    """The folder of the programs of a new environment that has `what`, and what it needs from ours."""
    venv.create(folder, with_pip=False)
    there = folder / ("Scripts" if sys.platform == "win32" else "bin")
    code, own = run(there / "python", "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])")
    assert code == 0, own
    Path(own.strip(), "needed.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")
    into = ("--python", there / "python", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation")
    code, said = run(sys.executable, "-m", "pip", "--disable-pip-version-check", *into, *what)
    assert code == 0, said
    return there


@pytest.fixture(scope="module")
def programs(wheel, tmp_path_factory):
    return install(tmp_path_factory.mktemp("installed"), wheel)


@pytest.fixture(scope="module")
def editable(source, tmp_path_factory):
    return install(tmp_path_factory.mktemp("editable"), "--editable", source)


@pytest.fixture(params=sooner(["programs", "editable"], kept=["programs"]))
def either(request):
    """Programs of the wheel, then of the checkout itself."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def call(programs, tmp_path):
    """A program called where folders named like our packages say that they were imported."""
    for name in (*PACKAGES, "amqtt"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise RuntimeError('imported {name} of the user')\n")

    def called(program, *words):
        code, said = call_in(tmp_path, programs, program, *words)
        assert "of the user" not in said, said
        return code, said

    return called


def call_in(folder, programs, program, *words):
    path = f"{programs}:/usr/bin:/bin:/usr/sbin"
    environment = {"PATH": path, "OMP_NUM_THREADS": "1", "HOME": str(folder)}
    code, said = run(programs / program, *words, cwd=folder, env=environment)
    assert "Traceback" not in said, said
    return code, said


def test_every_file_beside_the_sources_is_in_the_wheel(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        f"fleetune/{file.relative_to(ROOT)}"
        for package in PACKAGES
        for file in (ROOT / package).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    docs = {name for name in wanted if name.startswith("fleetune/tools/docs/")}
    wanted -= docs
    needed = {"tools/demo.toml", "tools/papers/kapc-mnist.toml", "protocols/bundle/files/mlp-1x8x8-10.bundle"}
    assert {f"fleetune/{name}" for name in needed} <= wanted
    assert wanted <= held, sorted(wanted - held)
    assert docs, "the generator of the documentation's pages"
    assert not docs & held
    assert {name.split("/")[0] for name in held} <= {"fleetune", f"fleetune-{VERSION}.dist-info"}


def test_a_source_distribution_makes_the_same_wheel(source, wheel, tmp_path):
    """The links at src/fleetune become folders in it."""
    for folder in ("sdist", "wheel"):
        (tmp_path / folder).mkdir()
    with tarfile.open(build("sdist", source, tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    again = build("wheel", next((tmp_path / "unpacked").iterdir()), tmp_path / "wheel")
    contents = [
        {one.filename: one.CRC for one in zipfile.ZipFile(path).infolist()} for path in (wheel, again)
    ]
    assert contents[0] == contents[1]


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        ("edge-sim --version", f"fleetune {VERSION}"),
        ("edge-coordinator --version", f"fleetune {VERSION}"),
        ("edge-agent --version", f"fleetune {VERSION}"),
        ("edge-sim paper", "kapc-mnist"),
        pytest.param("edge-sim link presets", "4g", marks=pytest.mark.nightly),
        ("edge-coordinator serve --help", "RUN_FILE"),
        pytest.param(
            "edge-coordinator export lenet5 --input 1x28x28 --classes 10", "lenet5", marks=pytest.mark.nightly
        ),
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


@pytest.mark.nightly
def test_a_run_with_workers_finds_a_users_own_model_beside_such_folders(call, programs, tmp_path):
    (tmp_path / "mine.py").write_text(MODEL)
    demo = next(programs.parent.rglob("tools/demo.toml"))
    small = ("--set", "run.rounds=1", "--set", "model.name=mine:net", "--workers", "2")
    code, said = call("edge-sim", "run", demo, *small)
    assert code == 0, said
    assert (tmp_path / "runs" / "demo" / "summary.json").is_file()


@pytest.fixture
def users_folder(tmp_path):
    """Code of the user's own in folders that our repository has too."""
    own = {"protocols/mydata.py": DATA, "tools/nets.py": MODEL, "coordinator/mymethods.py": METHOD}
    for name, text in own.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_users_own_packages_of_our_folders_names_are_found(either, users_folder):
    """Data, model and method of a run, in its workers too; an agent's data."""
    demo = ROOT / "tools" / "demo.toml"
    own = (
        "data.source=protocols.mydata:load",
        "model.name=tools.nets:net",
        "method.name=coordinator.mymethods:Own",
    )
    changes = [word for change in (*own, "run.rounds=1") for word in ("--set", change)]
    words = ("run", demo, *changes, "--workers", "2")
    code, said = call_in(users_folder, either, "edge-sim", *words)
    assert code == 0, said
    summary = json.loads((users_folder / "runs" / "demo" / "summary.json").read_text())
    assert (summary["method"], summary["model"]) == ("coordinator.mymethods:Own", "tools.nets:net")
    code, said = call_in(
        users_folder, either, "edge-agent", "doctor", "--json", "--data", "protocols.mydata:load"
    )
    assert "600 samples" in said, said


@pytest.mark.nightly
def test_a_users_type_checker_knows_what_is_public(either, tmp_path):
    """Of the wheel and of an editable install alike: py.typed is found, and so is every type behind it."""
    (tmp_path / "mine.py").write_text(TYPED)
    heavy = (
        "torch",
        "matplotlib",
        "scipy",
        "sklearn",
        "amqtt",
        "onnxruntime",
        "rich",
        "typer",
        "safetensors",
        "pandas",
    )
    skipped = "".join(
        f"[mypy-{name}.*]\nfollow_imports = skip\nignore_missing_imports = true\n" for name in heavy
    )
    (tmp_path / "mypy.ini").write_text(f"[mypy]\nstrict = true\n{skipped}")
    checked = run(
        sys.executable, "-m", "mypy", "--python-executable", either / "python", "mine.py", cwd=tmp_path
    )
    assert [line.split(": ", 1)[1] for line in checked[1].splitlines() if line.startswith("mine.py")] == [
        'note: Revealed type is "fleetune.tools.research.result.Result"',
        'note: Revealed type is "fleetune.protocols.randomness.Key"',
        (
            'error: Incompatible types in assignment (expression has type "Board", variable has type "int")'
            "  [assignment]"
        ),
        'error: Module "fleetune" does not explicitly export attribute "import_module"  [attr-defined]',
    ], checked[1]


@pytest.mark.nightly
@pytest.mark.fleet
def test_the_demo_runs_beside_such_folders(call, tmp_path):
    code, said = call("python", "-P", "-m", "fleetune.tools.demo")
    assert code == 0, said
    assert "what each device gained" in said
    assert (tmp_path / "runs" / "demo" / "report.html").is_file()
