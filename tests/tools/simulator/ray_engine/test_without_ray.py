"""Without Ray everything is as ever, and whoever asks for it reads what to install."""

import subprocess
import sys

import pytest
from tests.tools.simulator.test_checkpoint import DEADLINE_S, TOML


@pytest.fixture
def run_here(tmp_path):
    """A command of edge-sim in a folder in which Ray is as if it were not installed."""
    (tmp_path / "run.toml").write_text(TOML.replace("rounds = 40", "rounds = 1"))
    (tmp_path / "ray.py").write_text("raise ImportError('no module named ray')")

    def run(*words):
        command = [sys.executable, "-m", "fleetune.tools.cli", "run", "run.toml", *words]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )

    return run


def test_it_is_one_line_that_says_what_to_install(run_here, tmp_path):
    done = run_here("--engine", "ray")
    assert done.returncode == 2
    assert done.stderr == ("edge-sim: --engine ray needs Ray, which is not installed here: pip install ray\n")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ("--address", "1.2.3.4:6379"),
            "--address names a Ray cluster, but the engine is local: add --engine ray",
        ),
        (("--engine", "ray", "--workers", "0"), "--workers 0: --engine ray needs at least 1 worker"),
    ],
)
def test_options_that_do_not_go_together_are_one_line(run_here, words, line):
    done = run_here(*words)
    assert (done.returncode, done.stderr) == (2, f"edge-sim: {line}\n")


def test_local_workers_need_no_ray(run_here):
    done = run_here("--workers", "1")
    assert (done.returncode, done.stderr) == (0, "")
