"""Memory that each method takes in a round, on a device and at the coordinator, in bytes for each parameter.

    python -m benchmarks.round_memory

A coordinator and three agents work in this process with files, but without a network. Only allocations of
Python and numpy count (tracemalloc), so other load on the machine does not change the figures.
"""

import gc
import json
import os
import tempfile
import tracemalloc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.model_memory import inputs_of
from fleetune.coordinator.rounds.engine_state import RoundAttempt
from fleetune.coordinator.rounds.events import DeviceReady
from fleetune.coordinator.run.enrolment import Beginning
from fleetune.coordinator.run.open_or_resume import open_run
from fleetune.coordinator.run.round_execution import Outcome
from fleetune.coordinator.run.run_events import RoundClosed
from fleetune.coordinator.tasks.assignment import OutgoingTask
from fleetune.edge_agent.extensions.extension import RunStart
from fleetune.edge_agent.extensions.order import extensions_of
from fleetune.edge_agent.run.session import Session
from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.edge_agent.state.deployed_files import DeployedFiles
from fleetune.edge_agent.training.device_data import DeviceData
from fleetune.edge_agent.training.local_training import LocalTrainer
from fleetune.edge_agent.training.onnx_backend import OnnxBackend
from fleetune.protocols.bundle.bundle import Bundle
from fleetune.protocols.errors import FleetuneError
from fleetune.protocols.method.choice import Budget, DeviceReport
from fleetune.protocols.methods import REGISTRY, with_defaults_of_run
from fleetune.protocols.one_line import one_line_errors
from fleetune.protocols.randomness import Key
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.run_toml import parse_run
from fleetune.protocols.wire.payloads import Enrolment

DEVICES, ROUNDS, OUTPUTS = ("a", "b", "c"), 3, 10
RESULT = TypeVar("RESULT")


def settings_of(bundle: Bundle, method: Mapping[str, Any], encoding: str, devices: int) -> RunSettings:
    """Return the settings of a run with plain SGD, without momentum."""
    return parse_run(
        {
            "run": {"name": "large", "rounds": ROUNDS + 1},
            "model": {
                "name": "large",
                "input_shape": list(bundle.spec.input_shape),
                "num_classes": bundle.spec.num_classes,
            },
            "method": dict(method),
            "data": {"validation_fraction": 0.2},
            "encoding": {"up": encoding, "down": encoding},
            "training": {"batch_size": 2, "epochs": 1, "learning_rate": 1e-4},
            "round": {"deadline_s": 1000.0, "start_with": devices},
        }
    )


def _enrolment(bundle: Bundle, settings: RunSettings) -> Enrolment:
    weights = Key.of("large").generator().normal(0, 0.01, bundle.spec.size).astype(np.float32)
    return Enrolment(
        "large-0",
        0,
        bundle.spec,
        with_defaults_of_run(settings.method, settings.run.last_round, time_counts=False),
        settings.training,
        0.5,
        0.3,
        0.2,
        1000.0,
        1e3,
        1e3,
        weights,
        encoding=settings.encoding.values,
    )


def _data(bundle: Bundle, device: str) -> DeviceData:
    """Two samples of bytes for training, one for validation and one for tests."""
    x = Key.of("samples", device).generator().integers(0, 256, (4, *bundle.spec.input_shape), np.uint8)
    y = np.arange(4) % bundle.spec.num_classes
    return DeviceData(x[:2], y[:2], x[2:3], y[2:3], x[3:], y[3:], 0.5, 0.3)


class Fleet:
    """A coordinator and agents in this process, each with its files.

    Args:
        bundle: the model.
        folder: folder of all files.
        method: the [method] section.
        encoding: encoding of both directions.
        devices: names of the devices.
    """

    def __init__(
        self,
        bundle: Bundle,
        folder: Path,
        *,
        method: Mapping[str, Any] | None = None,
        encoding: str = "lossless",
        devices: Iterable[str] = DEVICES,
    ) -> None:
        self.devices = tuple(devices)
        settings = settings_of(bundle, method or {"name": "fedavg"}, encoding, len(self.devices))
        enrolment = _enrolment(bundle, settings)
        self.run = open_run(settings, folder / "run", durable=False, beginning=Beginning(enrolment))
        self.tasks: dict[str, tuple[RoundAttempt, bytes]] = {}
        self.closed = 0
        self.sessions = {
            device: self._session(bundle, AgentStore(folder / device)) for device in self.devices
        }
        for device in self.devices:
            report = DeviceReport(device, num_samples=2)
            self._take(self.run.controller.handle(DeviceReady(report, self.sessions[device].base), 0.0))

    def _session(self, bundle: Bundle, store: AgentStore) -> Session:
        enrolment, data = self.run.enrolment, _data(bundle, store.device)
        trainer = LocalTrainer(OnnxBackend(bundle), data, enrolment.training)
        start = RunStart.of(enrolment, trainer, DeployedFiles.next_to(store.deployed))
        memory, extensions = store.session("large"), extensions_of(start)
        return Session(enrolment, store.device, self.run.method, trainer, memory, extensions=extensions)

    def reply(self, device: str) -> tuple[RoundAttempt, bytes]:
        """Let an agent do its task; return the task's attempt and the encoded reply."""
        attempt, task = self.tasks.pop(device)
        return attempt, self.sessions[device].reply(task, Budget(1.0))

    def receive(self, device: str, attempt: RoundAttempt, reply: bytes) -> None:
        """Let the coordinator process a reply."""
        self._take(self.run.controller.receive(device, attempt, reply, RoundCost(), 1.0))

    def _take(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            if isinstance(outcome, OutgoingTask):
                self.tasks[outcome.device] = RoundAttempt.of(outcome.transfer_key), outcome.make()
            self.closed += isinstance(outcome, RoundClosed)

    def close(self) -> None:
        """Close the coordinator's store."""
        self.run.store.close()


class Traced:
    """Counts what Python and numpy allocate inside a `with` block."""

    def __enter__(self) -> Self:
        tracemalloc.start()
        return self

    def __exit__(self, *_: object) -> None:
        tracemalloc.stop()

    @property
    def held(self) -> int:
        """Bytes that are allocated now."""
        return tracemalloc.get_traced_memory()[0]

    def peak_of(self, do: Callable[..., RESULT], *given: Any) -> tuple[RESULT, int]:
        """Return a result, and the most bytes at once beyond those before."""
        before = self.held
        tracemalloc.reset_peak()
        done = do(*given)
        return done, tracemalloc.get_traced_memory()[1] - before


@dataclass(frozen=True)
class MethodMemory:
    """Bytes for each parameter that a method takes.

    Attributes:
        method: name of the method.
        agent: most bytes of an agent in a round.
        agent_rest: bytes of an agent between two rounds.
        coordinator: most bytes of the coordinator.
        coordinator_rest: bytes of the coordinator between two rounds.
    """

    method: str
    agent: float
    agent_rest: float
    coordinator: float
    coordinator_rest: float


def measured(method: str, bundle: Bundle, folder: Path) -> MethodMemory:
    """Run a fleet with this method and return its memory."""
    with Traced() as traced:
        fleet = Fleet(bundle, folder, method={"name": method})
        agent, coordinator = 0, 0
        while fleet.closed < ROUNDS:
            device = next(iter(fleet.tasks))
            (attempt, reply), peak = traced.peak_of(fleet.reply, device)
            agent = max(agent, peak)
            _, peak = traced.peak_of(fleet.receive, device, attempt, reply)
            coordinator = max(coordinator, peak)
        del reply
        fleet.tasks.clear()
        gc.collect()
        whole = traced.held
        fleet.sessions.pop(DEVICES[0])
        gc.collect()
        agent_rest = whole - traced.held
        fleet.sessions.clear()
        gc.collect()
        coordinator_rest = traced.held
        fleet.close()
    size = bundle.spec.size
    return MethodMemory(
        method,
        (agent + agent_rest) / size,
        agent_rest / size,
        (coordinator + coordinator_rest) / size,
        coordinator_rest / size,
    )


def _large_bundle(parameters: int) -> Bundle:
    from fleetune.coordinator.export.make_bundle import make_bundle
    from fleetune.protocols.wire.payloads import run_key

    return make_bundle("mlp", (inputs_of(parameters),), OUTPUTS, run_key(0).child("weights"))


def results_of(found: list[MethodMemory], parameters: int) -> dict[str, Any]:
    """Return a table for docs/results."""
    base = next((one for one in found if one.method == "fedavg"), found[0])
    rows = [
        [
            f"`{one.method}`",
            f"{one.agent:.0f}",
            f"{(one.agent - base.agent) / 4:+.1f}",
            f"{one.coordinator:.0f}",
            f"{(one.coordinator - base.coordinator) / 4:+.1f}",
        ]
        for one in found
    ]
    return {
        "columns": ["method", "agent", "vectors beyond FedAvg", "coordinator", "vectors beyond FedAvg"],
        "rows": rows,
        "note": f"Bytes for each parameter at the peak of three rounds: `mlp` with {parameters:,} parameters,"
        f" SGD without momentum, {len(DEVICES)} devices, encoding `lossless`, ONNX Runtime. Allocations of"
        " Python and numpy (tracemalloc), without the libraries. A vector is 4 bytes for each parameter.",
        "repeat": "python -m benchmarks.round_memory",
    }


def main(
    parameters: Annotated[int, typer.Option(help="of the model")] = 1_000_000,
    only: Annotated[str, typer.Option(help="comma-separated methods; else all")] = "",
    out: Annotated[Path | None, typer.Option(help="JSON file of a table, as in docs/results")] = None,
) -> None:
    """Measure the memory of each method in a round."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found: list[MethodMemory] = []
    table = Table("method", "agent", "at rest", "coordinator", "at rest")
    with one_line_errors("round_memory"), tempfile.TemporaryDirectory() as folder:
        bundle = _large_bundle(parameters)
        for name in only.split(",") if only else sorted(REGISTRY):
            try:
                found.append(one := measured(name, bundle, Path(folder) / name))
            except FleetuneError as problem:
                print(f"{name}: {problem}")
                continue
            figures = one.agent, one.agent_rest, one.coordinator, one.coordinator_rest
            table.add_row(name, *(f"{figure:.1f}" for figure in figures))
            if out is not None:
                out.write_text(json.dumps(results_of(found, bundle.spec.size), indent=1) + "\n")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
