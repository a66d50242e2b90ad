"""Every method over every task: rounds with real training, or one line that says what the method is for."""

import numpy as np
import pytest
from tests.helpers.errors import raises
from tests.helpers.nightly import of_methods
from torch import nn

from fleetune.coordinator.spec.spec_from_torch import draw
from fleetune.edge_agent.training.device_data import DeviceData, check_fits
from fleetune.edge_agent.training.local_training import LocalTrainer
from fleetune.edge_agent.training.torch_backend import TorchBackend
from fleetune.protocols.errors import SettingError
from fleetune.protocols.method.choice import Budget, DeviceReport
from fleetune.protocols.method.method import Round
from fleetune.protocols.methods import REGISTRY, from_section
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.device import TrainingSection
from fleetune.protocols.settings.task import TaskSection
from fleetune.protocols.tasks import TASKS, task_of

SHAPE, NUM_OUTPUTS, DEVICES = (6,), 3, ("d0", "d1")
FOR_CLASSES = {"pfedsd", "cd2-pfed", "lotteryfl"}


def small(input_shape, num_outputs):
    """Some 100 parameters."""
    return nn.Sequential(nn.Linear(*input_shape, 8), nn.ReLU(), nn.Linear(8, num_outputs))


def samples_of(kind, device):
    generator = np.random.default_rng(DEVICES.index(device))
    x = generator.normal(size=(16, *SHAPE)).astype(np.float32)
    truth = x[:, :NUM_OUTPUTS] * 2 + 1
    y = {
        "classification": truth.argmax(axis=1),
        "multi-label": (truth > 1).astype(np.float32),
        "reconstruction": np.zeros(16, np.int64),
    }.get(kind, truth)
    return DeviceData(x[:10], y[:10], x[10:13], y[10:13], x[13:], y[13:])


@pytest.fixture(scope="module", params=TASKS)
def fleet(request):
    """A task, a model's first weights, and each device's trainer."""
    task = task_of(TaskSection(kind=request.param))
    num_outputs = SHAPE[0] if request.param == "reconstruction" else NUM_OUTPUTS
    spec, weights = draw(f"{__name__}:small", SHAPE, num_outputs, Key(1))
    settings = TrainingSection(epochs=5, batch_size=5, learning_rate=0.1)
    trainers = {
        device: LocalTrainer(
            TorchBackend.from_spec(spec, task),
            check_fits(samples_of(task.kind, device), spec, task),
            settings,
        )
        for device in DEVICES
    }
    return task.kind, weights, trainers


@pytest.mark.parametrize("name", of_methods(REGISTRY))
def test_two_rounds_of_every_method_over_every_task_or_one_line(fleet, name):
    kind, weights, trainers = fleet
    spec = trainers["d0"].spec
    if name in FOR_CLASSES and kind != "classification":
        with raises(SettingError, "method.name", name, "task.kind", kind):
            from_section({"name": name}, spec, kind)
        return
    method = from_section({"name": name}, spec, kind)
    state = method.init_coordinator(weights)
    for device in DEVICES:
        state = method.admit(state, DeviceReport(device, num_samples=10, ratio=1.0))
    devices = {device: method.init_device(weights) for device in DEVICES}
    for number in (1, 2):
        state, tasks = method.plan(state, Round(number, DEVICES), Key(number))
        updates = {}
        for device, trainer in trainers.items():
            key = Key(number).child(device)
            devices[device], updates[device] = method.work(
                devices[device], tasks[device], trainer, Budget(), key
            )
        state = method.aggregate(state, updates.items())
    assert np.isfinite(method.shared_model(state)).all()
    for device, trainer in trainers.items():
        own = method.personal_model(devices[device])
        assert np.isfinite(own).all()
        assert trainer.loss(own, "train") < trainer.loss(weights, "train")
