"""Work in a process of its own: what it returns, how it fails, and that nothing of it stays."""

import operator
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.helpers.fleet_processes import wait_until

from fleetune.coordinator.run.child_process import find_model_in_child, in_child_process
from fleetune.coordinator.run.models import find_model
from fleetune.protocols.errors import ModelError, SettingError
from fleetune.protocols.settings.run_toml import parse_run

SETTINGS = {
    "run": {"name": "t"},
    "method": {"name": "fedavg"},
    "model": {"name": "torch.nn:Flatten", "input_shape": [4], "num_classes": 4},
}


def test_it_is_another_process_and_what_it_returns_comes_back():
    assert in_child_process("work", os.getpid) != os.getpid()
    assert in_child_process("work", operator.add, [1], [2]) == [1, 2]


@pytest.mark.parametrize(
    ("work", "line"),
    [
        ((operator.truediv, 1, 0), "^ZeroDivisionError: division by zero$"),
        ((os._exit, 3), "^work: its process ended with exit code 3; is there enough memory"),
        ((os.abort,), "^work: its process ended with exit code -6; is there enough memory"),
    ],
)
def test_a_failure_is_one_line(work, line):
    with pytest.raises(ModelError, match=line):
        in_child_process("work", *work)


def test_time_that_is_up_is_one_line():
    with pytest.raises(ModelError, match=r"^work: no result after 0.5 s$"):
        in_child_process("work", time.sleep, 600, timeout_s=0.5)


def test_a_mistake_in_the_settings_is_told_as_in_this_process():
    settings = parse_run({**SETTINGS, "model": {"name": "no.module:here"}})
    with pytest.raises(SettingError) as here:
        find_model(settings)
    with pytest.raises(SettingError) as there:
        find_model_in_child(settings)
    assert str(there.value) == str(here.value)


def script(*lines):
    return [sys.executable, "-c", "\n".join(lines)]


def test_torch_is_gone_when_it_is_over(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n\ndef net(input_shape, num_classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))\n"
    )
    model = {"name": "mine:net", "input_shape": [1, 8, 8], "num_classes": 10}
    done = subprocess.run(
        script(
            "import sys",
            "from fleetune.coordinator.run.child_process import in_child_process, find_model_in_child",
            "from fleetune.coordinator.run.models import make_run_bundle",
            "from fleetune.protocols.settings.run_toml import parse_run",
            f"settings = parse_run({ {**SETTINGS, 'model': model}!r})",
            "if __name__ == '__main__':",
            "    print(find_model_in_child(settings).spec.size)",
            "    print(len(in_child_process('the bundle', make_run_bundle, settings).graphs) > 0)",
            "    print('torch' in sys.modules)",
        ),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.stdout.split() == ["650", "True", "False"], done.stderr


LONG = (
    "import threading, time, sys",
    "from fleetune.coordinator.run.child_process import in_child_process",
    "if __name__ == '__main__':",
    "    threading.Thread(target=in_child_process, args=('work', time.sleep, 600), daemon=True).start()",
)


def children(pid):
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return {int(child) for task in tasks for child in (task / "children").read_text().split()}


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_the_coordinator_however_that_ends(number):
    command = script(*LONG, "    time.sleep(600)")
    with subprocess.Popen(command) as parent:
        wait_until(lambda: children(parent.pid), "there is a child")
        found = children(parent.pid)
        wait_until(lambda: any(map(_is_tied, found)), "it works")
        parent.send_signal(number)
        parent.wait(60)
    wait_until(lambda: not any(map(alive, found)), "none is left")


def _is_tied(pid):
    """It ignores the terminal's signals, which is the last that it does before."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    ignored = next(line for line in lines if line.startswith("SigIgn"))
    return bool(int(ignored.split()[1], 16) & 1 << signal.SIGINT - 1)


def test_an_orderly_end_does_not_wait_for_it():
    command = script(*LONG, "    time.sleep(0.5)", "    sys.exit(3)")
    assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 3
