"""A wheel of a later commit is newer for pip, and takes the place of the older one whole."""

import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from packaging.version import Version
from tests.helpers.places import ROOT

FIRST = "4a09b180c79c"  # the last commit whose version was 0.1.0, whatever it held
PATIENCE_S = 120


def run(*command, cwd=None):
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def git(*words, cwd=ROOT):
    return run("git", *words, cwd=cwd)


def build(source, into):
    """The wheel of a source tree, built without a network, and what the build printed."""
    script = "from setuptools.build_meta import build_wheel; import sys; build_wheel(sys.argv[1])"
    said = run(sys.executable, "-c", script, into, cwd=source)
    return next(into.glob("*.whl")), said


def version_of(wheel):
    return Version(wheel.name.split("-")[1])


@pytest.fixture
def tree(tmp_path):
    """A source tree as small as it may be, with its links and without git."""
    folder = tmp_path / "tree"
    folder.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    package = folder / "src" / "fleetune"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("COMMIT = 1\n")
    return folder


def commit(tree, text):
    (tree / "src" / "fleetune" / "__init__.py").write_text(f"COMMIT = {text!r}\n")
    git("add", "-A", cwd=tree)
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    git(*who, "commit", "-q", "-m", text, cwd=tree)


def test_the_version_rises_with_each_commit(tree, tmp_path):
    git("init", "-q", cwd=tree)
    versions = []
    for text in ("one", "two"):
        commit(tree, text)
        wheel, _ = build(tree, tmp_path / text)
        versions.append(version_of(wheel))
    assert versions == [Version("0.2.0.dev1"), Version("0.2.0.dev2")]
    assert Version("0.1.0") < versions[0] < versions[1]


def test_a_tree_without_history_builds_and_says_so(tree, tmp_path):
    wheel, said = build(tree, tmp_path / "without")
    assert version_of(wheel) == Version("0.2.0.dev0")
    assert "version 0.2.0.dev0, because it has no git history" in said
    git("init", "-q", cwd=tree)
    commit(tree, "one")
    commit(tree, "two")
    shallow = tmp_path / "shallow"
    git("clone", "-q", "--depth", "1", f"file://{tree}", shallow)
    wheel, said = build(shallow, tmp_path / "thin")
    assert version_of(wheel) == Version("0.2.0.dev0")
    assert "its clone is shallow: run `git fetch --unshallow`" in said


def in_use(python):
    """What a program of that environment runs: the package's code and the version that pip knows."""
    script = (
        "import fleetune, importlib.metadata as m; from pathlib import Path;"
        "print(m.version('fleetune'), Path(fleetune.__file__).with_name('py.typed').read_text())"
    )
    return run(python, "-I", "-c", script).split()


def test_pip_upgrades_from_the_wheel_of_0_1_0_through_two_commits(tmp_path):
    """Each time the code changes, and no package of before is left."""
    if subprocess.run(
        ["git", "cat-file", "-e", FIRST], cwd=ROOT, check=False, capture_output=True
    ).returncode:
        pytest.skip(f"needs the git history of this repository back to {FIRST}")
    clone = tmp_path / "clone"
    git("clone", "-q", ROOT, clone)
    git("checkout", "-q", FIRST, cwd=clone)
    wheels = [marked_wheel(clone, "first", tmp_path / "first")]
    git("checkout", "-q", "--force", git("rev-parse", "HEAD", cwd=ROOT).strip(), cwd=clone)
    for name in ("pyproject.toml", "setup.py"):  # as they stand here, committed or not
        shutil.copy(ROOT / name, clone / name)
    for text in ("second", "third"):
        who = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        git(*who, "commit", "-q", "--allow-empty", "-am", text, cwd=clone)
        wheels.append(marked_wheel(clone, text, tmp_path / text))
    assert version_of(wheels[0]) == Version("0.1.0")
    python = environment(tmp_path / "environment")
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip())
    for wheel, text in zip(wheels, ("first", "second", "third"), strict=True):
        install(python, wheel)
        assert in_use(python) == [str(version_of(wheel)), text]
        left = {path.name for path in site.iterdir() if re.match(r"fleetune", path.name)}
        assert left == {"fleetune", f"fleetune-{version_of(wheel)}.dist-info"}


def marked_wheel(clone, text, into):
    """The wheel of a checkout in which one packaged file says which build it is."""
    (clone / "src" / "fleetune" / "py.typed").write_text(text)
    shutil.rmtree(clone / "build", ignore_errors=True)
    return build(clone, into)[0]


def environment(folder):
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    own = run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip()
    Path(own, "needed.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")
    return python


def install(python, wheel):
    """`pip install -U WHEEL`, without the network."""
    into = ("--python", python, "install", "-q", "-U", "--no-deps", "--no-index")
    run(sys.executable, "-m", "pip", "--disable-pip-version-check", *into, wheel)
