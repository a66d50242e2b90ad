"""A reproducible run of a real method: devices are an agent's sessions that compute with plain arithmetic.

Coordinator and agents store their states on disk. Both may be closed after any event and opened again, also
by another release. The sent bytes and the results are recorded, so that releases can be compared.
"""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import UNSET
from tests.conftest import PullToTarget, tiny_spec

from fleetune.coordinator.rounds.engine_state import RoundAttempt
from fleetune.coordinator.rounds.events import DeviceReady, Tick
from fleetune.coordinator.run.enrolment import Beginning
from fleetune.coordinator.run.open_or_resume import open_run
from fleetune.coordinator.run.round_execution import Outcome
from fleetune.coordinator.run.stored_run import Run
from fleetune.coordinator.tasks.assignment import OutgoingTask
from fleetune.edge_agent.run.session import Session
from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.protocols.method.choice import RATIOS, Budget, DeviceReport, RatioCandidate, value_byte_shares
from fleetune.protocols.randomness import Key
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.settings.encoding import PLAIN
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.run_toml import parse_run
from fleetune.protocols.update.encodings import chosen
from fleetune.protocols.wire.payloads import Enrolment

SPEC = tiny_spec()
DEVICES = {"a": 1.0, "b": 0.5, "c": 1.0, "d": 0.5}  # ratios of the devices
PACE = (
    "a",
    "b",
    "a",
    "c",
    "b",
    "a",
    "b",
    "a",
    "d",
    "c",
    "b",
    "a",
)  # devices that may reply; a and b are the fast ones
MODES = {
    "synchronous": {"deadline_s": 1000.0, "start_with": 4},
    "buffer": {"mode": "buffer", "buffer": 2, "max_staleness": 3, "start_with": 4, "deadline_s": 1000.0},
}
ROUNDS = 4


def settings(
    method: str,
    mode: str,
    up: str = "raw",
    down: str = "raw",
    minimise: str = "none",
) -> RunSettings:
    return parse_run(
        {
            "run": {"name": "played", "rounds": ROUNDS},
            "model": {"name": "tiny", "input_shape": [4], "num_classes": 3},
            "method": {"name": method},
            "data": {"source": "digits", "validation_fraction": 0.2},
            "encoding": {"up": up, "down": down},
            "objective": {"minimise": minimise},
            "round": MODES[mode],
        }
    )


def enrolment(run_settings: RunSettings) -> Enrolment:
    weights = Key.of("weights").uniform(SPEC.size).astype(np.float32) - np.float32(0.5)
    training, encoding = run_settings.training, run_settings.encoding.values
    begun = Enrolment(
        "played-0", 0, SPEC, run_settings.method, training, 0.0, 1.0, 0.2, 1000.0, 1e3, 1e3, weights
    )
    if run_settings.proposes_ratios:
        least_work, encodings = run_settings.objective.least_work, run_settings.uplinks[1:]
        begun = replace(begun, proposes=True, least_work=least_work, encodings=encodings or UNSET)
    return begun if encoding == PLAIN.values else replace(begun, encoding=encoding)


def report_of(device: str, run_settings: RunSettings) -> DeviceReport:
    """A device's report: its chosen ratio, or the costs of all ratios up to it."""
    ratio = DEVICES[device]
    report = DeviceReport(device, num_samples=10, ratio=ratio)
    if not run_settings.proposes_ratios:
        return report
    training_s = 20.0 if device == "d" else 2.0
    affords = tuple(
        RatioCandidate(
            one, training_s + 10 * one, local_s=training_s, values_up=round(1e6 * one), values_s=9 * one
        )
        for one in RATIOS
        if one <= ratio
    )
    values = value_byte_shares([chosen(one) for one in run_settings.uplinks])
    return replace(report, affords=affords, values=values)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


class PlayedRun:
    """A run with its coordinator in `folder`/run and its agents in `folder`/agents."""

    def __init__(
        self,
        folder: Path,
        *ways: str,
        **more: Any,
    ) -> None:
        """Open the run; for `ways` and `more` see `settings`."""
        asked = settings(*ways, **more)
        self.folder = folder
        self.run: Run = open_run(asked, folder / "run", durable=False, beginning=Beginning(enrolment(asked)))
        self.sessions = {device: self.session(device) for device in DEVICES}
        self.tasks: dict[str, tuple[RoundAttempt, bytes]] = {}
        self.sent: list[tuple[str, int, int, str]] = []

    def session(self, device: str) -> Session:
        store = AgentStore(self.folder / "agents" / "fleet" / device)
        store.claim().close()
        trainer = PullToTarget(SPEC, device, rate=0.2 + 0.1 * ord(device[0]) % 0.3)
        return Session(self.run.enrolment, device, self.run.method, trainer, store.session("played"))

    def play(self, begin: int = 0, end: int = 200) -> int:
        """Handle events from number `begin`, where the folder's state is, to number `end` or the run's
        end.
        """
        self.take(self.run.controller.resume(float(begin)) if begin else [])
        for device in DEVICES:
            report = report_of(device, self.run.settings)
            ready = DeviceReady(report, self.sessions[device].base)
            self.take(self.run.controller.handle(ready, float(begin)))
        number = begin
        while number < end and self.run.controller.finished is None:
            number += 1
            self.step(PACE[number % len(PACE)], float(number))
        return number

    def step(self, device: str, now: float) -> None:
        """Let the device reply if it has a task; else advance the time."""
        if device not in self.tasks:
            self.take(self.run.controller.handle(Tick(), now))
            return
        turn, task = self.tasks.pop(device)
        reply = self.sessions[device].reply(task, Budget(DEVICES[device]))
        self.sent.append((device, -1, -1, digest(reply)))
        took = RoundCost(compression_error=self.sessions[device].done.compression_error)
        self.take(self.run.controller.receive(device, turn, reply, took, now))

    def take(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            if isinstance(outcome, OutgoingTask):
                device, key, task = outcome.device, outcome.transfer_key, outcome.make()
                self.tasks[device] = RoundAttempt.of(key), task
                self.sent.append((device, key.round, key.attempt, digest(task)))
                self.run.controller.note_delivered(device, key, len(task))

    def end(self) -> dict[str, object]:
        """Digests of the sent payloads in order, and the run's results."""
        controller, shared = self.run.controller, self.run.controller.shared_model
        personal = {name: digest(one.personal_model.tobytes()) for name, one in self.sessions.items()}
        return {
            "sent": [list(one) for one in self.sent],
            "shared": None if shared is None else digest(shared.tobytes()),
            "personal": personal,
            "records": controller.records(),
            "traffic": controller.ledger.traffic,
        }

    def close(self) -> None:
        self.run.store.close()
