"""A fleet of real processes on loopback: broker, coordinator and agents, which tests kill and restart.

The expected results are those of a simulation of the same run.toml.
"""

import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import msgspec
import numpy as np
import psutil
from safetensors.numpy import load_file
from tests.helpers.places import ROOT
from tests.helpers.ports import free_port

from fleetune.coordinator.broker.embedded_broker import EmbeddedBroker
from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.coordinator.run.stored_run import method_of, save_shared_model
from fleetune.coordinator.store.device_rows import read_ledger
from fleetune.coordinator.store.method_state import read_state
from fleetune.coordinator.store.run_store import RunStore
from fleetune.edge_agent.extensions.adoption.deployed_model import read_deployed
from fleetune.edge_agent.run.session import Session
from fleetune.edge_agent.state.agent_store import AgentStore, FileMemory
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.run_toml import parse_run, read_run
from fleetune.protocols.update import codec
from fleetune.protocols.wire.payloads import Enrolment
from fleetune.tools.simulator.runner import simulate
from fleetune.tools.simulator.write_device_files import write_device_files

PATIENCE_S = 90
BOARDS = ("raspberry-pi-zero-2w", "raspberry-pi-4b", "n100-gateway")  # devices in the order of run.toml
RATIOS = (0.2, 0.6, 1.0)  # also in the order of run.toml

RUN_TOML = """
[run]
name = "{name}"
rounds = {rounds}
[model]
name = "{model}"
input_shape = {shape}
num_classes = 10
[method]
name = "{method}"
[data]
source = "{source}"
std = 0.5
partition = {{ kind = "dirichlet", alpha = 1.0, samples = 200 }}
[training]
epochs = {epochs}
batch_size = 16
learning_rate = 0.02
[round]
start_with = {start_with}
quorum = {quorum}
{selection}
deadline_s = {deadline_s}
[fleet]
devices = {devices}
boards = {{ {boards} }}
ratios = {ratios}
"""


def run_toml(
    *,
    name="fleet",
    method="fedspu",
    rounds=3,
    epochs=1,
    devices=3,
    start_with=3,
    quorum=1,
    selection="",
    deadline_s=600,
    source="digits",
    shape="[1, 8, 8]",
    model="mlp",
):
    boards = ", ".join(f"{board} = 1" for board in BOARDS[:devices])
    ratios = list(RATIOS[:devices])
    return RUN_TOML.format(**locals())


def images():
    """Synthetic images, 1 x 28 x 28, for a model whose update takes long on a slow link."""
    noise = Key.of("images").uniform(600 * 784).astype(np.float32).reshape(600, 1, 28, 28)
    labels = np.arange(600) % 10
    noise[np.arange(600), 0, labels] += 1  # a bright row marks the class
    return noise, labels


class Child:
    """A process of the fleet; its output goes to a file."""

    def __init__(self, name, command, log, *, prefix=(), python=sys.executable, **environment):
        self.name, self.log = name, log
        with log.open("ab") as output:
            self._start_of_log = output.tell()
            self._process = subprocess.Popen(
                [*prefix, python, "-m", *command],
                cwd=ROOT if python == sys.executable else log.parent,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def pid(self):
        return self._process.pid

    @property
    def running(self):
        return self._process.poll() is None

    def text(self):
        """The output of this process so far."""
        with self.log.open("rb") as file:
            file.seek(self._start_of_log)
            return file.read().decode(errors="replace")

    def lines(self, pattern):
        return [line for line in self.text().splitlines() if re.search(pattern, line)]

    def wait_for(self, pattern, count=1):
        """Wait until the output contains `pattern` so many times."""

        def said():
            assert self.running or len(self.lines(pattern)) >= count, f"{self.name} ended before {pattern!r}"
            return len(self.lines(pattern)) >= count

        wait_until(said, f"{self.name} says {pattern!r}")

    def wait(self):
        """Wait for the process to end; return its exit code."""
        return self._process.wait(PATIENCE_S)

    def send(self, number):
        self._process.send_signal(number)

    def stop(self, number=signal.SIGTERM):
        """Send a signal; return the exit code."""
        self.send(number)
        return self.wait()

    def kill(self):
        if self.running:
            self.send(signal.SIGCONT)
            self._process.kill()
        self._process.wait()


def wait_until(condition, what):
    give_up_at = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up_at, f"never: {what}"
        time.sleep(0.02)


class Fleet:
    """All processes of one fleet; leaving the `with` block always ends them.

    `embedded`: True if the coordinator starts the broker, as `serve` does by default; else the test starts
    it.
    """

    def __init__(self, folder, toml, which="auto", *, embedded=False):
        self.folder, self._which, self._embedded = folder, which, embedded
        self.run_file = folder / "run.toml"
        self.run_file.write_text(toml)
        self.settings = read_run(self.run_file)
        self.name = self.settings.run.name
        self.shares = {path.stem: path for path in write_device_files(self.settings, folder / "data")}
        self.agents = {}
        self._children = []

    def __enter__(self):
        if self._embedded:
            self.port = free_port()
            return self
        self.broker = EmbeddedBroker.start(self.folder / "broker", which=self._which)
        self.port = self.broker.port
        return self

    def __exit__(self, kind, problem, trace):
        with ExitStack() as stack:
            if not self._embedded:
                stack.callback(self.broker.kill)
            for child in self._children:
                stack.callback(child.kill)
        if problem is not None:
            self._show_logs()

    def start(self, **agent):
        """Start a coordinator and all agents."""
        self.start_coordinator()
        for device in self.shares:
            self.start_agent(device, **agent)

    def restart_broker(self):
        self.broker = EmbeddedBroker.start(
            self.folder / "broker", port=self.broker.port, which=self.broker.which
        )

    def embedded_broker(self):
        """The process of the coordinator's own broker; None if it is not running."""
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.coordinator.pid).children():
                if any("mosquitto" in word or "amqtt" in word for word in child.cmdline()[:4]):
                    return child
        return None

    def kill_embedded_broker(self):
        """Kill the coordinator's own broker; True if it was running."""
        broker = self.embedded_broker()
        with suppress(psutil.NoSuchProcess):
            if broker is not None and broker.status() != psutil.STATUS_ZOMBIE:
                broker.kill()
                return True
        return False

    def start_coordinator(self, *options, **environment):
        command = [
            "fleetune.coordinator.cli",
            "serve",
            str(self.run_file),
            "--runs",
            str(self.folder / "runs"),
        ]
        where = ["--port", str(self.port)] if self._embedded else ["--broker", self.address(self.port)]
        command += [*where, *options]
        self.coordinator = self._start("coordinator", command, **environment)
        return self.coordinator

    def start_agent(
        self,
        device,
        *,
        port=None,
        data=None,
        options=("--leave-after-run",),
        prefix=(),
        trainer="torch",
        program="fleetune.edge_agent.cli",
        log=None,
        **environment,
    ):
        """Start an agent.

        The trainer is torch by default, because simulations train with it and results are compared to the
        last bit. `environment` may name a `python`. A second agent of one device needs its own `log`.
        """
        place = list(self.shares).index(device) if device in self.shares else None
        board = "generic" if place is None else BOARDS[place]
        command = [
            program,
            "run",
            "--fleet",
            self.name,
            "--device",
            device,
            "--board",
            board,
        ]
        command += ["--trainer", trainer]
        command += ["--broker", self.address(port or self.port), "--state", str(self.folder / "state")]
        command += ["--data", data or f"npz:{self.shares[device]}", *options]
        agent = self.agents[log or device] = self._start(log or device, command, prefix, **environment)
        return agent

    @staticmethod
    def address(port):
        return f"127.0.0.1:{port}"

    def wait_finished(self):
        """Wait until coordinator and agents have ended successfully."""
        assert self.coordinator.wait() == 0
        for agent in self.agents.values():
            if agent.running:
                assert agent.wait() == 0

    def outcome(self, name=None):
        """The result of the finished run; `name` selects a run other than the fleet's first."""
        run = self.folder / "runs" / (name or self.name)
        devices = self.folder / "state" / self.name
        return read_outcome(run, lambda device, run_id: devices / device / "runs" / run_id / "session")

    def served(self):
        """Metadata of each device's deployed model."""
        return {device: found.record for device, found in self.served_models().items()}

    def served_models(self):
        """Each device's deployed model."""
        stores = {device: AgentStore(self.folder / "state" / self.name / device) for device in self.shares}
        return {device: read_deployed(store.deployed.read()) for device, store in stores.items()}

    def summary(self):
        return msgspec.json.decode((self.folder / "runs" / self.name / "summary.json").read_bytes())

    def _start(self, name, command, prefix=(), **environment):
        child = Child(name, command, self.folder / f"{name}.log", prefix=prefix, **environment)
        self._children.append(child)
        return child

    def _show_logs(self):
        for log in sorted([*self.folder.glob("*.log"), *self.folder.glob("**/broker/*.log")]):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-6000:]}")


@dataclass(frozen=True)
class Outcome:
    """The result of a run, without times and the run's id.

    Attributes:
        shared: the coordinator's model, flat.
        tensors: the same as in models/shared.safetensors.
        personal: each device's own model, flat.
        traffic: payload bytes by device: down, up, final evaluation down and up, number of tasks and updates.
        as_papers: bytes by device as papers count them: down, up.
        rounds: number and attempt of each closed round, and for each device bytes down, bytes up and metrics.
    """

    shared: bytes
    tensors: dict[str, bytes]
    personal: dict[str, bytes]
    traffic: dict[str, tuple[int, ...]]
    as_papers: dict[str, tuple[int, int]]
    rounds: list[tuple]


def read_outcome(run_folder, session_file):
    store = RunStore.open(run_folder / "state.sqlite")
    enrolment = codec.decode(store.get("enrolment"), Enrolment, None)
    method = method_of(enrolment)
    state = read_state(store, method.state_type, enrolment.spec)
    ledger = read_ledger(store)
    rounds = [_counted(record) for record in store.records()]
    store.close()
    files = {device: session_file(device, enrolment.run) for device in ledger.traffic}
    sessions = {
        device: Session(enrolment, device, method, None, FileMemory(file))
        for device, file in files.items()
        if file.exists()
    }
    tensors = load_file(run_folder / "models" / "shared.safetensors")
    return Outcome(
        shared=method.shared_model(state).tobytes(),
        tensors={name: tensor.tobytes() for name, tensor in tensors.items()},
        personal={device: session.personal_model.tobytes() for device, session in sessions.items()},
        traffic={device: _bytes_of(traffic) for device, traffic in ledger.traffic.items()},
        as_papers={device: (one.paper_down, one.paper_up) for device, one in ledger.traffic.items()},
        rounds=rounds,
    )


def _bytes_of(traffic):
    return (
        traffic.down,
        traffic.up,
        traffic.final_evaluation_down,
        traffic.final_evaluation_up,
        traffic.tasks,
        traffic.updates,
    )


def _counted(record: RoundRecord):
    replies = {name: (one.bytes_down, one.bytes_up, one.measures) for name, one in record.devices.items()}
    return record.number, record.attempt, record.participants, replies


def assert_equal(found, wanted):
    """Check that all values are equal to the last bit, except those that depend on time."""
    assert found.rounds == wanted.rounds
    assert found.traffic == wanted.traffic
    assert found.as_papers == wanted.as_papers
    assert found.shared == wanted.shared
    assert found.tensors == wanted.tensors
    assert found.personal == wanted.personal


_expected = {}


def expected(toml, folder):
    """The result of a simulation of this run.toml, simulated once for all tests."""
    if toml not in _expected:
        _expected[toml] = simulated(toml, folder)
    return _expected[toml]


def simulated(toml, folder):
    """The result of a simulation of this run.toml; `folder` may hold other runs from which it continues."""
    run, _ = simulate(parse_run(tomllib.loads(toml)), folder, workers=0, fresh=True)
    save_shared_model(run)
    run.store.close()
    return read_outcome(folder, lambda device, _: folder / "devices" / f"{device}.state")
