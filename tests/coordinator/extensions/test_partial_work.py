"""Updates of a share of the local training count as if all had done the same (FedNova)."""

import numpy as np
import pytest
from tests.conftest import tiny_spec

from fleetune.coordinator.extensions.extension import Extensions, RoundUpdates
from fleetune.coordinator.extensions.partial_work import PartialWork, move, share_done
from fleetune.coordinator.rounds.engine_state import EngineState, Member
from fleetune.protocols.method.averaging import Task, Update, covered_average
from fleetune.protocols.method.choice import Budget, DeviceReport
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Everything, Neurons
from fleetune.protocols.wire.payloads import Measures, Reply

SPEC = tiny_spec()
EVERYTHING = Everything()
SENT = EVERYTHING.mask(SPEC)
START = np.random.default_rng(1).normal(size=SPEC.size).astype(np.float32)


def member(num_samples, local_work=None):
    assigned_ratio = None if local_work is None else Budget(0.5, local_work)
    return Member(report=DeviceReport("d", num_samples=num_samples), assigned=assigned_ratio)


def normalised(ends, **devices):
    """The updates of these devices as they count: by device what its values end at, samples and shares."""
    state = EngineState(members={name: member(*told) for name, told in devices.items()})
    tasks = dict.fromkeys(devices, Task(Patch.of(START, EVERYTHING, SPEC)))
    replies = {name: reply(name, ends[name], told[0]) for name, told in devices.items()}
    names = tuple(devices)
    round_ = RoundUpdates(1, names, None, tasks, replies.__getitem__)
    return list(Extensions((PartialWork(state, SPEC),)).updates(round_))


def reply(name, end, num_samples, **told):
    update = Update(Patch.of(end, EVERYTHING, SPEC), num_samples)
    return Reply(name, 1, 1, False, Measures(num_samples, 0, **told), update)


@pytest.mark.parametrize("share", [0.25, 0.75, 1.0, None])
def test_where_all_do_the_same_nothing_changes(share):
    ends = dict.fromkeys("abc", START + 1)
    for _, update in normalised(ends, a=(10, share), b=(33, share), c=(7, share)):
        assert np.array_equal(update.patch.values, (START + 1)[SENT])
    ((_, update),) = normalised(ends, a=(0, 0.5))
    assert update.patch.values == pytest.approx((START + 2)[SENT], abs=1e-6)


def test_the_mean_of_normalised_updates_is_that_of_the_paper():
    """w + tau_eff * sum(p_i * (w_i - w) / tau_i), tau_eff = sum(p_i * tau_i), with tau the shares."""
    rng = np.random.default_rng(0)
    told = {"a": (10, 0.25), "b": (30, 1.0), "c": (20, 0.75)}
    ends = {name: START + rng.normal(0, 0.1, SPEC.size).astype(np.float32) for name in told}
    updates = normalised(ends, **told)
    shares = {name: num_samples / 60 for name, (num_samples, _) in told.items()}
    effective = sum(shares[name] * work for name, (_, work) in told.items())
    step = sum(shares[name] * (ends[name] - START) / work for name, (_, work) in told.items())
    merged = covered_average(START, updates, SPEC)
    assert merged[SENT] == pytest.approx((START + effective * step)[SENT], abs=1e-6)


def test_a_device_is_believed_within_what_was_asked_of_it_and_what_is_ever_asked():
    def done(asked, **told):
        return share_done(member(10, asked), Measures(10, 0, **told))

    assert done(0.5) == 0.5
    assert done(1.0, local_work=0.6) == 0.6
    assert done(0.5, local_work=1.0) == 0.5
    assert done(1.0, local_work=1e-9) == 0.25, "or it would count a thousand million times"
    assert done(None, local_work=0.5) == 0.5
    assert done(4.0) == 1.0, "what is left out is once"
    assert done(4.0, local_work=4.0) == 4.0


def test_entries_that_the_task_did_not_bring_stay():
    part = Neurons(0.5, 7)
    update = Update(Patch.of(START + 1, EVERYTHING, SPEC), 10)
    move(update, Task(Patch.of(START, part, SPEC)), 2.0, SPEC)
    brought = part.mask(SPEC)[SENT]
    assert update.patch.values[brought] == pytest.approx((START + 2)[SENT][brought], abs=1e-6)
    assert np.array_equal(update.patch.values[~brought], (START + 1)[SENT][~brought])
