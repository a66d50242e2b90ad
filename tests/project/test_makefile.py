"""The Makefile's environment: what was interrupted begins anew, what is there is not made again."""

import os
import shutil
import subprocess
import sys

import pytest
from tests.helpers.places import ROOT

# Stands for python3 and for pip; fails where BREAK says so, leaving what an interrupted one would leave.
PYTHON = """#!/bin/sh
echo "python $*" >> calls
[ "$2" = venv ] || exit 0
for last in "$@"; do :; done
[ "$3" = --clear ] && rm -rf "$last"
[ -e "$last/half" ] && { echo "a half environment" >&2; exit 1; }
mkdir -p "$last/bin"
touch "$last/half"
[ "$BREAK" = venv ] && exit 130
rm "$last/half"
cp pip "$last/bin/pip"
"""
PIP = """#!/bin/sh
echo "pip $*" >> calls
[ -e .venv/broken ] && { echo "no RECORD file was found" >&2; exit 1; }
touch .venv/broken
[ "$BREAK" = pip ] && exit 130
rm .venv/broken
"""


@pytest.fixture
def make(tmp_path):
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    for name, text in [("fake-python", PYTHON), ("pip", PIP)]:
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(target, broken=""):
        (tmp_path / "calls").write_text("")
        command = ["make", "-s", target, f"PYTHON={tmp_path / 'fake-python'}"]
        environment = {**os.environ, "BREAK": broken}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False)
        return done.returncode, (tmp_path / "calls").read_text().splitlines()

    return run


@pytest.mark.skipif(sys.platform == "win32", reason="sh")
@pytest.mark.parametrize("target", [".venv/demo", ".venv/dev", ".venv/zoo"])
@pytest.mark.parametrize("broken", ["venv", "pip"])
def test_an_environment_that_was_interrupted_is_made_anew(make, target, broken):
    assert make(target, broken)[0] != 0
    code, calls = make(target)
    assert code == 0, calls
    assert any("venv --clear" in call for call in calls)
    assert make(target) == (0, [])


@pytest.mark.skipif(sys.platform == "win32", reason="sh")
def test_more_is_installed_into_the_environment_that_is_there(make):
    assert make(".venv/demo")[0] == 0
    code, calls = make(".venv/dev")
    assert code == 0
    assert calls
    assert all(call.startswith("pip") for call in calls)
    assert make(".venv/demo") == (0, [])
