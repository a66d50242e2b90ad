"""Rounds that nobody can go on from: not finite, rolled back, tried again, and ended by name."""

import dataclasses

import numpy as np
import pytest
from tests.coordinator.extensions.test_norm_bound import forged
from tests.helpers.hostile_world import DEVICES, World, stores_closed  # noqa: F401 - a fixture

from fleetune.coordinator.rounds.rollback import MAX_RETRIES
from fleetune.protocols.errors import MethodError, TrainingDiverged
from fleetune.protocols.update import codec

LARGE = forged(lambda values: np.full_like(values, 1e30))
HONEST = set(DEVICES) - {"mallory"}


def once(forge, number=2):
    """Forge the update of the first attempt at this round only."""
    return lambda reply: forge(reply) if (reply.round, reply.attempt) == (number, 1) else reply


def states(world):
    return codec.encode(world.controller.method_state, world.enrolment.spec)


@pytest.mark.parametrize("restart", [False, True])
def test_a_round_that_breaks_everybodys_training_is_taken_back_and_done_without_the_offender(
    weights, tmp_path, restart
):
    world = World(tmp_path, "fedavg", {}, weights, forge=once(LARGE), norm_bound=0.0)
    world.join()
    while len(world.closed) < 1:
        world.step()
    before = states(world)
    while len(world.closed) < 2:
        world.step()
    assert abs(world.shared()).max() > 1e28
    if restart:
        world.restart()
    while not world.state.counters.get("rolled-back"):
        world.step()
    assert states(world) == before
    assert world.controller.records()[-1].number == 1
    assert world.state.round_attempt == (2, 2)
    assert set(world.state.participants) == HONEST
    while world.finished is None:
        world.step()
    assert world.finished == "all rounds are done"
    assert [(record.number, record.attempt) for record in world.controller.records()] == [
        (1, 1),
        (2, 2),
        (3, 2),  # its first attempt was declined by all
        (4, 1),
    ]
    assert set(world.controller.records()[1].devices) == HONEST
    assert set(world.controller.records()[2].devices) == set(DEVICES)
    assert abs(world.shared()).max() < 10
    traffic = world.controller.ledger.traffic
    assert {traffic[name].updates for name in HONEST} == {5}  # round 2 was done twice


def test_after_a_few_tries_training_ends_by_name_on_the_last_model_that_was_good(weights, tmp_path):
    """Everybody is told to have done it in turn: here no device can be told at all."""
    world = World(tmp_path, "fedavg", {}, weights, norm_bound=0.0)
    session = world.sessions["a"]
    honest = type(session._local.trainer).fit

    def breaks_after_round_2(self, weights, plan, key):
        if np.array_equal(weights[:3], poisoned.get("weights", ())):
            raise TrainingDiverged("training diverged (loss is inf)")
        return honest(self, weights, plan, key)

    poisoned = {}
    for one in world.sessions.values():
        trainer = one._local.trainer
        trainer.fit = breaks_after_round_2.__get__(trainer)
    world.join()
    while len(world.closed) < 1:
        world.step()
    good = states(world)
    while world.finished is None:
        if world.state.rounds_done == 2:
            poisoned["weights"] = world.shared()[:3].copy()
        world.step()
    assert world.finished == (
        f"round 2 was tried {MAX_RETRIES + 1} times and each time the training of all devices diverged after "
        "it; the list of rejections shows the devices"
    )
    assert states(world) == good
    assert [record.number for record in world.controller.records()] == [1]


def test_updates_that_do_not_aggregate_are_told_apart_and_the_round_closes_without_them(weights, tmp_path):
    """A method whose own sums overflow: float32 sums, as a method of the user's may take them."""
    world = World(tmp_path, "fedavg", {}, weights, forge=LARGE, norm_bound=0.0)
    plain = type(world.run.method).aggregate

    def careless(self, state, updates, combine):
        updates = list(updates)
        with_square = sum(np.float32(np.square(update.patch.values).sum()) for _, update in updates)
        merged = plain(self, state, updates, combine)
        return dataclasses.replace(merged, weights=merged.weights + np.float32(0) * with_square)

    object.__setattr__(world.run.method, "aggregate", careless.__get__(world.run.method))
    world.play()
    assert world.finished == "all rounds are done"
    assert [set(record.devices) for record in world.controller.records()] == 4 * [HONEST]
    assert world.state.counters["non-finite"] == 4
    assert np.isfinite(world.shared()).all()


def test_a_method_that_makes_nan_of_plain_updates_is_named(weights, tmp_path):
    world = World(tmp_path, "fedavg", {}, weights)
    nan = np.full_like(weights, np.nan)

    def broken(self, state, updates, combine):
        return dataclasses.replace(state, weights=nan + len(list(updates)))

    object.__setattr__(world.run.method, "aggregate", broken.__get__(world.run.method))
    with pytest.raises(MethodError, match=r"`aggregate` returns NaN or infinite numbers in state.weights"):
        world.play()
    assert not world.controller.records()
    assert np.array_equal(world.shared(), weights)


def test_one_device_that_says_so_does_not_undo_a_round(weights, tmp_path):
    world = World(tmp_path, "fedavg", {}, weights, participants=1)
    session = world.sessions["mallory"]
    session.reply = lambda *_: (_ for _ in ()).throw(_diverged())
    world.play()
    assert world.finished == "all rounds are done"
    assert "rolled-back" not in world.state.counters


def _diverged():
    return TrainingDiverged("training diverged (loss is inf)")


def test_a_fleet_whose_training_diverges_from_the_start_ends_by_name(weights, tmp_path):
    world = World(tmp_path, "fedavg", {}, np.full_like(weights, 1e9)).play()
    assert world.finished.startswith(
        "round 1 was tried 4 times and each time the training of all devices div"
    )
    assert not world.controller.records()
