"""One device's reply must not end a run: claims, sizes, and numbers that are no longer finite."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
from tests.helpers.every_method import SETTINGS
from tests.helpers.hostile_world import DEVICES, NUM_SAMPLES, SPEC, World, stores_closed  # noqa: F401 - a fixture
from tests.helpers.nightly import of_methods
from tests.protocols.methods.test_method_contract import Run

from fleetune.coordinator.extensions.extension import Arrival
from fleetune.coordinator.extensions.norm_bound import NormBound
from fleetune.coordinator.extensions.reply_claims import check_scores
from fleetune.coordinator.extensions.update_norms import (
    UpdateNorms,
    norm_ratio,
    not_finite,
    numbers,
    sizes_of,
    suspect,
)
from fleetune.coordinator.reports.report import summary_of
from fleetune.protocols.errors import PacketOverclaimed
from fleetune.protocols.method.averaging import Update
from fleetune.protocols.settings.task import TaskSection
from fleetune.protocols.tasks import task_of
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Everything
from fleetune.protocols.wire.payloads import Measures, Reply

IDS = ["-".join([name, *options]) for name, options in SETTINGS]
every_method = pytest.mark.parametrize(("name", "options"), of_methods(SETTINGS), ids=IDS)


def changed(value, change):
    """The same update with every array of floats, and every patch's values, as `change` makes them."""
    if isinstance(value, np.ndarray):
        return change(value) if value.dtype.kind == "f" and value.size else value
    if isinstance(value, tuple):
        return tuple(changed(one, change) for one in value)
    if dataclasses.is_dataclass(value):
        fields = {part.name: changed(getattr(value, part.name), change) for part in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value


def forged(change):
    return lambda reply: dataclasses.replace(reply, update=changed(reply.update, change))


def one_entry(size):
    def change(values):
        values = values.copy()
        values.flat[-1] = size
        return values

    return change


def sends_values(update):
    return any(isinstance(found, np.ndarray) and found.size for _, found in numbers(update, ""))


def has_claim(update):
    return hasattr(update, "num_samples")


@every_method
def test_the_norm_ratio_of_honest_rounds_is_far_from_the_bound(name, options, weights):
    """Far from the limit in every method, also for one device, a few, and a model that starts at 0."""
    for start in (weights, np.zeros_like(weights)):
        for participants in (("d0",), ("d0", "d1", "d2", "d3")):
            run = Run(name, options, start)
            aggregate, worst = run.method.aggregate, [0.0]

            def watched(state, updates, *combine, run=run, aggregate=aggregate, worst=worst):
                updates = list(updates)
                norms = UpdateNorms(run.method, lambda: run.state)
                for _, update in updates:
                    worst[0] = max(worst[0], norm_ratio(sizes_of(update), norms.model, []).times)
                return aggregate(state, updates, *combine)

            object.__setattr__(run.method, "aggregate", watched)
            for number in range(1, 7):
                run.round(number, participants=participants)
            assert worst[0] < 10  # the most is 5.9, FedPURIN's, whose averages shrink what few hold


@every_method
@pytest.mark.parametrize("size", [3e38, 1e5])
def test_one_giant_number_is_turned_away_and_the_round_closes_with_the_others(
    name, options, size, weights, tmp_path
):
    world = World(tmp_path, name, options, weights, forge=forged(one_entry(size))).play()
    assert world.finished == "all rounds are done"
    honest = World(tmp_path / "honest", name, options, weights).play()
    if not world.refused:  # nothing that it sends holds a value
        assert world.shared().tobytes() == honest.shared().tobytes()
        return
    assert {(who, kind) for who, kind, _ in world.refused} == {("mallory", "PacketOutlying")}
    assert [set(record.devices) for record in world.closed] == 4 * [set(DEVICES) - {"mallory"}]
    assert abs(world.shared()).max() < 5 * max(1, abs(honest.shared()).max())
    summary = summary_of(world.run, simulated=False)
    assert summary.refused_by_device == {"mallory": {"PacketOutlying": len(world.refused)}}
    assert summary.refused["PacketOutlying"] == summary.refused["engine-declined"]


@every_method
def test_a_reply_claims_no_more_samples_than_its_device_reported(name, options, weights, tmp_path):
    def claims(reply):
        if has_claim(reply.update):
            return dataclasses.replace(reply, update=dataclasses.replace(reply.update, num_samples=2**40))
        measures = dataclasses.replace(reply.measures, num_samples=2**40)
        return dataclasses.replace(reply, measures=measures)

    world = World(tmp_path, name, options, weights, forge=claims).play()
    assert world.finished == "all rounds are done"
    assert {kind for _, kind, _ in world.refused} == {"PacketOverclaimed"}
    assert f"is {2**40}, but the device reported {NUM_SAMPLES} training samples" in world.refused[0][2]


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        ({"after": 5.0}, "after is 5, but accuracy is 0 to 1"),
        ({"before": -0.5}, "before is -0.5, but accuracy is 0 to 1"),
        ({"scores": {"accuracy": 0.5, "auroc": 1.5}}, "scores[auroc] is 1.5, but auroc is 0 to 1"),
        ({"scores": {"luck": 0.5}}, "scores[luck]: classification has no such score"),
    ],
)
def test_a_score_that_the_task_cannot_give_is_turned_away(lie, words, weights, tmp_path):
    def lies(reply):
        return dataclasses.replace(reply, measures=dataclasses.replace(reply.measures, **lie))

    world = World(tmp_path, "fedavg", {}, weights, forge=lies).play()
    assert world.finished == "all rounds are done"
    assert {(who, kind) for who, kind, _ in world.refused} == {("mallory", "PacketOverclaimed")}
    assert words in world.refused[0][2]


def test_numbers_of_a_regression_are_in_their_own_unit():
    task = task_of(TaskSection(kind="regression"))
    check_scores(Measures(5, 5, before=7.0, after=70.0, scores={"rmse": 70.0, "mae": 9.0, "r2": -3.0}), task)
    with pytest.raises(PacketOverclaimed, match=r"scores\[accuracy\]: regression has no such score"):
        check_scores(Measures(5, 5, scores={"accuracy": 0.5}), task)


@every_method
def test_without_the_bound_no_task_holds_what_is_not_finite_and_the_run_ends(
    name, options, weights, tmp_path
):
    """Off by choice: the largest finite numbers get in. Every task that is sent is finite (`World` looks)."""
    largest = forged(lambda values: np.full_like(values, 3e38))
    world = World(tmp_path, name, options, weights, forge=largest, norm_bound=0.0).play()
    assert not world.refused
    assert not_finite(world.controller.method_state, "state") is None
    assert world.finished == "all rounds are done" or "each time" in world.finished


def test_sizes_are_those_of_all_that_an_update_holds():
    values = np.array([3, -4, 0, 0], np.float32)
    update = Update(Patch(Everything(), values), 5)
    assert sizes_of(update) == {"peak": 4.0, "RMS": 2.5}
    largest = Update(Patch(Everything(), np.full(4, 3e38, np.float32)), 5)
    assert math.isclose(sizes_of(largest)["RMS"], 3e38, rel_tol=1e-6)
    assert not sizes_of(Update(Patch(Everything(), values[:0]), 5))


def test_a_size_is_held_against_the_larger_of_the_model_and_the_others():
    own = {"peak": 50.0, "RMS": 2.0}
    assert norm_ratio(own, {"peak": 10.0, "RMS": 1.0}, []).times == 5
    assert norm_ratio(own, {"peak": 10.0, "RMS": 1.0}, 3 * [{"peak": 25.0, "RMS": 1.0}]).times == 2
    assert norm_ratio(own, {}, []).times == 50  # against the floors, where nothing else is known
    assert norm_ratio({"update.loss": 400.0}, {}, 2 * [{"update.loss": 100.0}]).times == 4


def test_others_are_asked_for_only_when_the_model_alone_would_turn_an_update_away():
    method = SimpleNamespace(shared_model=lambda _: np.ones(SPEC.size, np.float32))
    bound, asked = NormBound(10.0, UpdateNorms(method, lambda: None)), []

    def others(size):
        asked.append(size)
        return iter([Update(Patch(Everything(), np.full(4, size, np.float32)), 5)])

    def arrival(size, others):
        update = Update(Patch(Everything(), np.full(4, size, np.float32)), 5)
        return Arrival(Reply("a", 1, 1, False, Measures(5, 0), update), None, True, others)

    bound.check(arrival(9, lambda: others(1)))
    assert not asked
    bound.check(arrival(90, lambda: others(30)))
    assert asked == [30]


def test_the_worst_is_told_only_when_it_is_clear():
    assert suspect({}) == ()
    assert suspect({"a": 1.0, "b": 1.1}) == ()
    assert suspect({"a": 9.0, "b": 8.0}) == ()
    assert suspect({"a": 1.0, "b": 90.0}) == ("b",)
