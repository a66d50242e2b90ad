"""A service with two fleets of real processes: paused, resumed, killed, stopped, started, changed, ended."""

import os
import signal
from contextlib import ExitStack

import msgspec
import pytest
from tests.helpers.fleet_processes import Child, run_toml, wait_until
from typer.testing import CliRunner

from fleetune.coordinator.cli import app
from fleetune.coordinator.run.stored_run import stored_run
from fleetune.coordinator.service.run_process import PORTS
from fleetune.coordinator.service.service import OWN, RUNS, read_statuses
from fleetune.coordinator.store.device_rows import read_engine
from fleetune.protocols.errors import FleetuneError
from fleetune.protocols.settings.run_toml import read_run
from fleetune.tools.simulator.write_device_files import write_device_files

NAMES = ("one", "two")


def toml(name, rounds='"open"'):
    text = run_toml(name=name, method="fedavg", devices=1, start_with=1).replace(
        "rounds = 3", f"rounds = {rounds}"
    )
    return text + '\n[schedule]\nevery = "1s"\n'


class Served:
    """A service's folder, its process, and an agent for each of its fleets."""

    def __init__(self, folder, stack):
        self.folder, self._stack = folder, stack
        for name in NAMES:
            self.write(name, toml(name))
        self.service = self._start("service", "service", str(folder), "--port", "0")
        wait_until(self._has_ports, "each fleet has a port")
        for name, port in self._ports().items():
            settings = read_run(folder / f"{name}.toml")
            (share,) = write_device_files(settings, folder / f"data-{name}")
            command = ["run", "--fleet", name, "--device", share.stem, "--trainer", "onnx"]
            command += [
                "--broker",
                f"127.0.0.1:{port}",
                "--state",
                str(folder / "state"),
                "--data",
                f"npz:{share}",
            ]
            self._start(f"agent-{name}", *command, program="fleetune.edge_agent.cli")

    def write(self, name, text):
        draft = self.folder / "draft"
        draft.write_text(text)
        draft.replace(self.folder / f"{name}.toml")

    def command(self, *arguments):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        return result.output

    def order(self, command, name):
        return self.command(command, name, "--service", str(self.folder))

    def note(self, name):
        return next((one for one in read_statuses(self.folder) if one.name == name), None)

    def state(self, name):
        """Of its engine; None: it has none yet."""
        try:
            with stored_run(self.folder / RUNS / name) as kept:
                return read_engine(kept.store)
        except FleetuneError:
            return None

    def rounds(self, name):
        state = self.state(name)
        return 0 if state is None else state.rounds_done

    def wait_for_rounds(self, name, more=1):
        wanted = self.rounds(name) + more
        wait_until(lambda: self.rounds(name) >= wanted, f"{name} has closed {wanted} rounds")

    def wait_for_state(self, name, state):
        wait_until(
            lambda: self.note(name) is not None and self.note(name).state == state, f"{name} is {state}"
        )

    def _has_ports(self):
        assert self.service.running, self.service.text()
        return len(self._ports()) == len(NAMES)

    def _ports(self):
        path = self.folder / OWN / PORTS
        return msgspec.json.decode(path.read_bytes()) if path.exists() else {}

    def _start(self, name, *arguments, program="fleetune.coordinator.cli"):
        child = Child(name, [program, *arguments], self.folder / f"{name}.log")
        self._stack.callback(child.kill)
        return child


@pytest.fixture
def served(tmp_path):
    with ExitStack() as stack:
        made = Served(tmp_path, stack)
        try:
            yield made
        finally:
            for log in sorted([*tmp_path.glob("*.log"), *(tmp_path / OWN).glob("*.log")]):
                print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}")


@pytest.mark.nightly
def test_two_fleets_are_served_side_by_side_and_orders_are_obeyed(served):
    for name in NAMES:
        served.wait_for_rounds(name)
    served.order("pause", "one")
    wait_until(lambda: served.state("one").paused and not served.state("one").running, "one is paused")
    held = served.rounds("one")
    killed = served.note("two").pid
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: served.note("two").pid not in (None, killed), "two is begun again")
    served.wait_for_rounds("two", 2)
    assert served.rounds("one") == held
    overview = served.command("status", str(served.folder))
    assert "paused: no round opens until" in overview
    served.order("resume", "one")
    served.wait_for_rounds("one")

    served.order("stop", "one")
    served.wait_for_state("one", "stopped")
    served.write("two", toml("two", served.rounds("two") + 1))
    served.wait_for_state("two", "finished")
    assert (served.folder / RUNS / "two" / "report.html").is_file()
    served.order("start", "one")
    served.wait_for_rounds("one")
    assert served.service.stop() == 0
    assert all(note.pid is None for note in read_statuses(served.folder))
