"""Methods whose devices train from what their task brings: without training they send it back."""

import numpy as np
import pytest
from tests.conftest import PullToTarget, tiny_spec
from tests.helpers.every_method import SETTINGS

from fleetune.protocols.method.choice import Budget, DeviceReport
from fleetune.protocols.method.method import Round
from fleetune.protocols.method.trainer import Fit
from fleetune.protocols.methods import REGISTRY, create
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.patch import patches_in
from fleetune.protocols.update.reference_model import ReferenceModel

SPEC = tiny_spec(400)
DEVICES = {"a": 1.0, "b": 0.5, "c": 1.0}
DRIFT_THRESHOLD = [one for one in SETTINGS if create(one[0], SPEC, one[1]).starts_from_task]


class StandsStill(PullToTarget):
    """It trains, and nothing changes."""

    def fit(self, weights, plan, key):
        return Fit(weights.copy(), 1.0, 1, self.gradient(weights) if plan.keep_last_gradient else None)

    def gradient(self, weights, rows=None):
        return np.zeros_like(weights)


def played(method, last_trainer, rounds=3):
    """Tasks and updates of the last round."""
    state = method.init_coordinator(Key.of("start").uniform(SPEC.size).astype(np.float32) - np.float32(0.5))
    devices = {name: method.init_device(method.shared_model(state)) for name in DEVICES}
    for name, ratio in DEVICES.items():
        state = method.admit(state, DeviceReport(name, ratio=ratio, num_samples=10))
    for number in range(1, rounds + 1):
        state, tasks = method.plan(state, Round(number, tuple(DEVICES)), Key.of(number))
        made, updates = {name: tasks[name] for name in DEVICES}, {}
        for name, ratio in DEVICES.items():
            trainer = (last_trainer if number == rounds else PullToTarget)(SPEC, name)
            given = devices[name], made[name], trainer, Budget(ratio), Key.of(number, name)
            devices[name], updates[name] = method.work(*given)
        state = method.aggregate(state, updates.items())
    return made, updates


@pytest.mark.parametrize(("name", "settings"), DRIFT_THRESHOLD, ids=str)
def test_without_training_an_update_is_what_the_task_brought(name, settings):
    tasks, updates = played(create(name, SPEC, settings), StandsStill)
    for device, task in tasks.items():
        brought = ReferenceModel.of_task(task, SPEC)
        for patch in patches_in(updates[device]):
            mask = patch.selection.mask(SPEC)
            both = brought.held[mask]
            assert np.allclose(patch.values[both], brought.values[mask][both], atol=1e-6)


def test_who_says_so_and_who_does_not():
    told = {name for name, _ in DRIFT_THRESHOLD}
    assert {"fedavg", "fedspu", "srp-pfed", "dc-pfl", "fedrep", "hermes"} <= told
    assert not told & {"kapc", "kapc-bls", "fedpurin", "fedcac", "fedamp", "pfedla", "clusterfl"}
    assert told <= set(REGISTRY)
