"""Ctrl-C and SIGTERM in edge-sim: one line, the status that shells expect, and nobody left behind."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from fleetune.coordinator.run.stored_run import look_at
from fleetune.protocols.errors import SettingError
from fleetune.tools.stop_signals import ReportedInterrupt, in_one_line

DEADLINE_S = 200
RUN = """
[run]
name = "digits"
rounds = 100000
[model]
name = "mlp"
[data]
source = "digits"
[method]
name = "fedavg"
[training]
epochs = 100  # so that round 1 is not over when its first device is
[fleet]
devices = 4
"""
EDGE_SIM = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
    "from fleetune.tools.cli import app; app()"
)


@pytest.mark.parametrize(
    ("command", "number", "everybody", "status", "last"),
    [
        (
            ["run", "--workers", "2"],
            signal.SIGINT,
            True,
            130,
            "stopped in round 1: the same command begins anew",
        ),
        (
            ["compare", "--workers", "1", "--methods", "fedavg,local-only"],
            signal.SIGTERM,
            False,
            143,
            "with 0 of 2 runs finished; the same command goes on",
        ),
    ],
    ids=["run", "compare"],
)
def test_stopped_in_mid_round_with_workers(tmp_path, command, number, everybody, status, last):
    (tmp_path / "run.toml").write_text(RUN)
    words = [sys.executable, "-c", EDGE_SIM, command[0], "run.toml", *command[1:]]
    edge_sim = subprocess.Popen(
        words,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    give_up = time.monotonic() + DEADLINE_S
    while not any(path.stat().st_size for path in (tmp_path / "runs").rglob("devices/*")):
        assert time.monotonic() < give_up, edge_sim.poll()
        time.sleep(0.05)
    workers = psutil.Process(edge_sim.pid).children(recursive=True)
    (os.killpg if everybody else os.kill)(edge_sim.pid, number)
    out, err = edge_sim.communicate(timeout=DEADLINE_S)
    assert err == ""
    assert edge_sim.returncode == status
    assert "Traceback" not in out
    said = [line for line in out.splitlines() if line.startswith("stopped")]
    assert len(said) == 1
    assert last in said[0]
    assert len(workers) > int(command[2]), "with what tracks their resources"
    assert psutil.wait_procs(workers, timeout=DEADLINE_S)[1] == []
    if command[0] == "run":
        with look_at(tmp_path / "runs" / "digits") as kept:
            assert kept.settings.run.rounds == 100_000


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"]
)
def test_who_says_nothing_gets_a_line_whatever_the_interrupt_became(number, status, capsys):
    before = [signal.signal(one, signal.default_int_handler) for one in (signal.SIGINT, signal.SIGTERM)]

    def importing():
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            raise ImportError("half a module") from None

    def told():
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            raise ReportedInterrupt from None

    try:
        for raises, line in ((importing, "edge-sim: stopped; give the same command again\n"), (told, "")):
            with pytest.raises(SystemExit) as ended, in_one_line("edge-sim"):
                raises()
            assert ended.value.code == status
            assert capsys.readouterr().err == line
    finally:
        for one, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(one, handler)


def test_what_nobody_interrupted_is_as_ever(capsys):
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), in_one_line("edge-sim"):
        raise ZeroDivisionError
    with pytest.raises(SystemExit) as ended, in_one_line("edge-sim"):
        raise SettingError("run.rounds: 1 or more")
    assert (ended.value.code, capsys.readouterr().err) == (2, "edge-sim: run.rounds: 1 or more\n")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
