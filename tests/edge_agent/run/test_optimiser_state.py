"""What the optimiser remembers goes with the device's state: over rounds, restarts, and what goes wrong."""

from dataclasses import replace

import numpy as np
import pytest
from tests import hostile
from tests.edge_agent.training.test_local_training import SoftmaxBackend, device_data

from fleetune.edge_agent.extensions.session_state import read_state
from fleetune.edge_agent.run.session import Session
from fleetune.edge_agent.training.local_training import LocalTrainer
from fleetune.protocols.errors import TrainingStopped
from fleetune.protocols.method.choice import Budget
from fleetune.protocols.method.method import Round
from fleetune.protocols.methods import create
from fleetune.protocols.settings.device import TrainingSection
from fleetune.protocols.update import codec
from fleetune.protocols.wire.payloads import Assignment, Enrolment, run_key

SPEC = SoftmaxBackend(6).spec
START = run_key(1).uniform(SPEC.size).astype(np.float32) - np.float32(0.5)
KEPT = {
    "sgd": {"momentum": 0.9, "optimiser_state": "device"},
    "adamw": {"optimiser": "adamw", "learning_rate": 0.01, "optimiser_state": "device"},
    "rmsprop": {"optimiser": "rmsprop", "learning_rate": 0.01, "optimiser_state": "device"},
}


class Box:
    plain = False

    def __init__(self, data=None):
        self.data = data

    def read(self):
        return self.data

    def write(self, data):
        self.data = data


class OneDevice:
    """Local training of a method, by an agent's own session; `memory` is what outlives it, `asks` what else
    the enrolment says.
    """

    def __init__(self, name, memory=None, asks=None, **training):
        training = TrainingSection(**{"batch_size": 8, "epochs": 2, **training})
        figures = (0.0, 1.0, 0.0, 1.0, 1.0, 1.0)
        enrolment = Enrolment("a", 0, SPEC, {"name": name}, training, *figures, START)
        self.enrolment = replace(enrolment, **(asks or {}))
        self.method, self.memory, self.stopping = create(name, SPEC, {}), memory or Box(), None
        trainer = LocalTrainer(SoftmaxBackend(6), device_data(6), training, lambda: self.stopping)
        self.session = Session(self.enrolment, "d", self.method, trainer, self.memory)

    def task(self, number, *, final_evaluation=False):
        state = self.method.init_coordinator(START)
        _, tasks = self.method.plan(state, Round(number, ("d",), final_evaluation), run_key(0))
        return codec.encode(Assignment("d", number, 1, final_evaluation, tasks["d"]), SPEC)

    def work(self, *numbers):
        for number in numbers:
            self.session.reply(self.task(number), Budget())
        return self

    def restarted(self):
        settings = {
            name: getattr(self.enrolment.training, name) for name in TrainingSection.__struct_fields__
        }
        return OneDevice(self.enrolment.method["name"], self.memory, **settings)

    @property
    def kept(self):
        return read_state(self.memory.data, self.method)


@pytest.mark.parametrize("optimiser", KEPT)
def test_a_restart_between_rounds_changes_nothing(optimiser):
    never = OneDevice("local-only", **KEPT[optimiser]).work(1, 2, 3)
    each = OneDevice("local-only", **KEPT[optimiser])
    for number in (1, 2, 3):
        each = each.work(number).restarted()
    assert each.memory.data == never.memory.data
    alone = OneDevice("local-only", **{**KEPT[optimiser], "optimiser_state": "round"}).work(1, 2, 3)
    assert alone.session.personal_model.tobytes() != never.session.personal_model.tobytes()


def test_each_local_training_of_a_round_has_a_state_of_its_own():
    device = OneDevice("ditto", **KEPT["adamw"]).work(1, 2)
    shared, personal = device.kept.slots["optimiser"]
    assert not np.array_equal(shared.vectors[0], personal.vectors[0])
    assert (shared.vectors[2] == 2 * 2 * 5).all()  # rounds, epochs, batches: the steps of every parameter
    assert shared.vectors[0].shape == (SPEC.num_parameters,)


def test_a_final_evaluation_leaves_what_is_remembered():
    device = OneDevice("fedavg", **KEPT["adamw"]).work(1)
    before = device.memory.data
    device.session.reply(device.task(2, final_evaluation=True), Budget())
    assert device.memory.data == before


def test_a_training_that_is_stopped_leaves_what_is_remembered_and_is_done_again():
    device = OneDevice("fedavg", **KEPT["adamw"]).work(1)
    before, device.stopping = device.memory.data, "the owner says so"
    with pytest.raises(TrainingStopped):
        device.work(2)
    assert device.memory.data == before
    device.stopping = None
    assert device.work(2).memory.data == OneDevice("fedavg", **KEPT["adamw"]).work(1, 2).memory.data


def test_a_run_that_keeps_nothing_stores_what_it_always_did():
    """And a state stored without is read: its optimiser begins anew."""
    device = OneDevice("fedavg", momentum=0.9).work(1)
    assert b"optimiser" not in hostile.body_of(device.memory.data)
    gone_on = OneDevice("fedavg", device.memory, **KEPT["sgd"]).work(2)
    assert len(gone_on.kept.slots["optimiser"]) == 1


def test_each_round_trains_at_its_own_learning_rate():
    warm = OneDevice("local-only", learning_rate=0.04, warmup_rounds=1)
    halved = OneDevice("local-only", learning_rate=0.02)
    whole = OneDevice("local-only", learning_rate=0.04, memory=Box())
    first = warm.work(1).session.personal_model
    assert first.tobytes() == halved.work(1).session.personal_model.tobytes()
    whole.session._state = halved.session._state
    assert warm.work(2).session.personal_model.tobytes() == whole.work(2).session.personal_model.tobytes()
