"""FedAvg's step at the coordinator: worked rounds with a rate and momentum, and nothing else without."""

import numpy as np
import pytest
from msgspec import UNSET
from tests.conftest import tiny_spec
from tests.hostile import body_of

from fleetune.protocols.method.averaging import SharedModel, Update
from fleetune.protocols.methods import create
from fleetune.protocols.update import codec
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Everything

SPEC = tiny_spec()
SHARED = Everything().mask(SPEC)  # all but running statistics


def whole(value):
    return np.full(SPEC.size, value, np.float32)


def averaged(method, state, *sent):
    updates = [
        (f"d{place}", Update(Patch.of(whole(value), Everything(), SPEC), samples))
        for place, (value, samples) in enumerate(sent)
    ]
    return method.aggregate(state, updates)


def test_without_settings_it_is_the_average_and_keeps_nothing():
    state = averaged(create("fedavg", SPEC, {}), SharedModel(whole(5)), (1, 1), (4, 2))
    assert state.velocity is UNSET
    np.testing.assert_array_equal(state.weights, np.where(SHARED, 3, 5))


def test_a_rate_takes_part_of_the_step():
    method = create("fedavg", SPEC, {"server_rate": 0.25})
    state = averaged(method, SharedModel(whole(8)), (2, 1), (6, 1))
    assert state.velocity is UNSET
    np.testing.assert_array_equal(state.weights, np.where(SHARED, 7, 8))


def test_momentum_goes_on_where_it_was_also_after_the_state_was_stored():
    method = create("fedavg", SPEC, {"server_rate": 0.5, "server_momentum": 0.5})
    state = method.init_coordinator(whole(0))
    expected, velocity = 0.0, 0.0
    for sent in (4.0, 2.0, -3.0):
        velocity = 0.5 * velocity + (sent - expected)
        expected += 0.5 * velocity
        stored = codec.encode(averaged(method, state, (sent, 3)), SPEC)
        state = codec.decode(stored, method.state_type, SPEC)
        np.testing.assert_array_equal(state.weights, np.where(SHARED, expected, 0))
    np.testing.assert_array_equal(state.velocity, np.where(SHARED, velocity, 0))


def test_what_is_stored_without_momentum_is_what_it_always_was():
    state = averaged(create("fedavg", SPEC, {"server_rate": 0.5}), SharedModel(whole(1)), (2, 1))
    assert b"velocity" not in body_of(codec.encode(state, SPEC))


@pytest.mark.parametrize("settings", [{"server_rate": 2.0}, {"server_momentum": 0.5}])
def test_a_round_without_updates_moves_only_by_momentum(settings):
    method = create("fedavg", SPEC, settings)
    state = averaged(method, SharedModel(whole(0)), (1, 1))
    after = averaged(method, state)
    moved = 0.5 if "server_momentum" in settings else 0.0
    np.testing.assert_array_equal(after.weights - state.weights, np.where(SHARED, moved, 0))
