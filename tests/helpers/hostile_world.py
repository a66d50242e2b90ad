"""A whole run in one process with the real run controller and real sessions; a test may forge replies."""

import numpy as np
import pytest
from msgspec import UNSET
from tests.conftest import PullToTarget, tiny_spec

from fleetune.coordinator.extensions.privacy.accountant import most_tasks
from fleetune.coordinator.rounds.engine_state import RoundAttempt
from fleetune.coordinator.rounds.events import Declined, DeviceReady, Tick
from fleetune.coordinator.run.enrolment import Beginning
from fleetune.coordinator.run.open_or_resume import open_run
from fleetune.coordinator.run.run_events import ReplyRefused, RoundClosed, RunFinished
from fleetune.coordinator.tasks.assignment import OutgoingTask
from fleetune.edge_agent.run.session import Session
from fleetune.protocols.errors import PacketNotFinite, TrainingDiverged
from fleetune.protocols.finite import not_finite
from fleetune.protocols.method.choice import Budget, DeviceReport
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.settings.device import TrainingSection
from fleetune.protocols.settings.run_toml import parse_run
from fleetune.protocols.update import codec
from fleetune.protocols.wire.payloads import Assignment, Enrolment, Reply

SPEC = tiny_spec()
DEVICES = ("a", "b", "c", "mallory")
NUM_SAMPLES = 10


_open = []


@pytest.fixture(autouse=True)
def stores_closed():
    """Close all stores at the end, so that a test need not close its worlds."""
    yield
    while _open:
        _open.pop().run.store.close()


class Box:
    plain = False

    def __init__(self):
        self.data = None

    def read(self):
        return self.data

    def write(self, data):
        self.data = data


class Frail(PullToTarget):
    """A trainer that diverges on weights with which no learning rate could continue."""

    def fit(self, weights, plan, key):
        if abs(weights).max() > 1e6:
            raise TrainingDiverged("training diverged (loss is inf)")
        return super().fit(weights, plan, key)


class World:
    """A run with a hostile device, mallory.

    Args: the method's name and settings, the first weights, `forge(reply)`, which replaces mallory's replies,
    and the content of [privacy].
    """

    def __init__(
        self, folder, name, options, weights, *, forge=lambda reply: reply, rounds=4, privacy=None, **round_
    ):
        self.folder, self.forge = folder, forge
        self.settings = parse_run(
            {
                "run": {"name": "world", "rounds": rounds, "final_evaluation": False},
                "model": {"name": "mlp", "input_shape": [4], "num_classes": 3},
                "method": {"name": name, **options},
                "data": {"validation_fraction": 0.2},
                "round": {"start_with": len(DEVICES), "deadline_s": 10.0, **round_},
                **({} if privacy is None else {"privacy": privacy}),
            }
        )
        section = self.settings.privacy
        self.enrolment = Enrolment(
            run="r",
            seed=0,
            spec=SPEC,
            method={"name": name, **options},
            training=TrainingSection(),
            mean=0.0,
            std=1.0,
            validation_fraction=0.2,
            deadline_s=10.0,
            flops_per_sample=1.0,
            activation_bytes_per_sample=1.0,
            weights=weights,
            privacy=section or UNSET,
            most_tasks=(section and most_tasks(section)) or UNSET,
        )
        self.run = open_run(self.settings, folder, durable=False, beginning=Beginning(self.enrolment))
        _open.append(self)
        self.sessions = {name: self._session(name) for name in DEVICES}
        self.now, self.tasks, self.closed, self.finished = 0.0, {}, [], None
        self.refused, self.seen = [], []

    @property
    def controller(self):
        return self.run.controller

    @property
    def state(self):
        return self.controller.engine_state

    def shared(self):
        return self.controller.shared_model

    def join(self, **reports):
        for name in DEVICES:
            report = reports.get(name, DeviceReport(name, num_samples=NUM_SAMPLES))
            self.take(self.controller.handle(DeviceReady(report), self.now))

    def play(self, steps=400):
        self.join()
        while self.finished is None and steps:
            self.step()
            steps -= 1
        assert self.finished is not None
        return self

    def step(self):
        """Let the first device with a task reply; without a task, advance the time."""
        if not self.tasks:
            self.now = max(self.now + 1, self.controller.wake_at or 0.0)
            self.take(self.controller.handle(Tick(), self.now))
            return
        name, (transfer_key, payload) = min(self.tasks.items())
        del self.tasks[name]
        turn = RoundAttempt.of(transfer_key)
        try:
            data = self._answer(name, payload)
        except TrainingDiverged as problem:
            self.take(self.controller.handle(Declined(name, *turn, str(problem), diverged=True), self.now))
            return
        self.take(self.controller.receive(name, turn, data, RoundCost(), self.now))

    def restart(self):
        self.run.store.close()
        self.tasks = {}
        self.run = open_run(self.settings, self.folder, durable=False)
        self.take(self.controller.resume(self.now))
        self.join()

    def take(self, outcomes):
        unsent = []
        for outcome in outcomes:
            match outcome:
                case OutgoingTask(device, transfer_key):
                    try:
                        self.tasks[device] = transfer_key, outcome.make()
                    except PacketNotFinite as problem:
                        unsent.append(outcome.declined(problem))
                case ReplyRefused(device, _, _, problem):
                    self.refused.append((device, type(problem).__name__, str(problem)))
                case RoundClosed(record):
                    self.closed.append(record)
                case RunFinished(reason):
                    self.finished = reason
        for declined in unsent:
            self.take(self.controller.handle(declined, self.now))

    def _answer(self, name, payload):
        method = self.run.method
        assignment = codec.decode(payload, Assignment[method.task_type], SPEC, finite=False)
        assert not_finite(assignment, "task") is None
        with np.errstate(over="ignore"):  # loss terms that `PullToTarget` computes
            data = self.sessions[name].reply(payload, Budget())
        if name != "mallory":
            return data
        reply = codec.decode(data, Reply[method.update_type], SPEC)
        self.seen.append((reply.round, reply.attempt))
        return codec.encode(self.forge(reply), SPEC)

    def _session(self, name):
        trainer = Frail(SPEC, name, NUM_SAMPLES)
        return Session(self.enrolment, name, self.run.method, trainer, Box())
