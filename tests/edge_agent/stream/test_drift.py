"""DriftState: quiet at the stated rate where nothing changes, an alarm where something does."""

import numpy as np
import pytest

from fleetune.edge_agent.stream import drift
from fleetune.edge_agent.stream.drift import (
    FALSE_ALARMS,
    PATIENCE,
    REFERENCE,
    WINDOW,
    input_drift,
    loss_drift,
    project,
)
from fleetune.edge_agent.stream.sample import make_sample
from fleetune.edge_agent.stream.sample_store import SampleStore
from fleetune.edge_agent.stream.store_values import TrainingRound

TRIALS = 1000
KNOWN = [1.072222, 1.402136, 0.824786, 0.577350, -1.237179, 1.072222]


def projections(rng, count, draw):
    return np.stack([project(draw(rng).astype(np.float32)) for _ in range(count)])


@pytest.mark.parametrize("kind", ["normal", "lognormal", "whole numbers"])
def test_no_more_false_alarms_than_stated(kind):
    rng = np.random.default_rng(7)
    draw = {
        "normal": lambda size: rng.normal(size=size),
        "lognormal": lambda size: rng.lognormal(sigma=2, size=size),
        "whole numbers": lambda size: rng.poisson(3, size).astype(float),
    }[kind]
    alarms = 0
    for _ in range(TRIALS):
        alarms += input_drift(draw((REFERENCE, drift.DIRECTIONS)), draw((WINDOW, drift.DIRECTIONS))) >= 1
    assert alarms <= FALSE_ALARMS * TRIALS + 4 * np.sqrt(FALSE_ALARMS * TRIALS)
    alarms = sum(loss_drift(draw(REFERENCE), draw(WINDOW)) >= 1 for _ in range(TRIALS))
    assert alarms <= FALSE_ALARMS * TRIALS + 4 * np.sqrt(FALSE_ALARMS * TRIALS)


SHIFTS = {
    "brighter": (lambda rng: rng.normal(0, 1, 64), lambda rng: rng.normal(0.1, 1, 64)),
    "shakier": (lambda rng: rng.normal(0, 1, 64), lambda rng: rng.normal(0, 1.15, 64)),
    "one sensor of many": (
        lambda rng: rng.normal(0, 1, 6),
        lambda rng: rng.normal(0, 1, 6) + np.array([0, 2.0, 0, 0, 0, 0]),
    ),
    "another mixture": (
        lambda rng: rng.normal(rng.choice([-1, 1], p=[0.8, 0.2]), 0.5, 16),
        lambda rng: rng.normal(rng.choice([-1, 1], p=[0.4, 0.6]), 0.5, 16),
    ),
}


@pytest.mark.parametrize(("before", "after"), SHIFTS.values(), ids=SHIFTS)
def test_an_alarm_after_a_shift(before, after):
    rng = np.random.default_rng(3)
    reference = projections(rng, REFERENCE, before)
    assert input_drift(reference, projections(rng, WINDOW, before)) < 1
    assert input_drift(reference, projections(rng, WINDOW, after)) >= 1


def test_only_a_higher_loss_counts():
    rng = np.random.default_rng(1)
    reference = rng.exponential(1.0, 300)
    assert loss_drift(reference, rng.exponential(2.0, WINDOW)) >= 1
    assert loss_drift(reference, rng.exponential(0.3, WINDOW)) < 0.5
    assert loss_drift(reference[:10], reference) is None
    assert loss_drift(reference, reference[:0]) is None


def test_an_inputs_numbers_are_the_same_everywhere():
    x = np.arange(12, dtype=np.float32).reshape(3, 4) / 7
    assert project(x).tolist() == pytest.approx([0.785714, 0.493151, *KNOWN], abs=1e-5)
    assert project((x * 0 + 51).astype(np.uint8))[:2].tolist() == pytest.approx([0.2, 0.0], abs=1e-6)
    huge = project(np.full(100_000, 3e38, np.float32))
    assert np.isfinite(huge).all()


def test_a_store_tells_of_drift_once_it_was_trained_on_and_again_only_when_it_comes_again(tmp_path):
    rng, store = np.random.default_rng(0), SampleStore.open(tmp_path / "s.sqlite")

    def come(count, mean):
        store.add([make_sample(x, 0) for x in rng.normal(mean, 1, (count, 8)).astype(np.float32)])
        return store.drift.inputs

    def train(number):
        store.pin(TrainingRound("r", number, 1))
        store.mark_trained(TrainingRound("r", number, 1))
        return store.drift.inputs

    assert come(600, 0) is None
    assert train(1) is None
    assert come(WINDOW - 1, 0) is None
    assert come(1, 0) < 1
    store.close()
    store = SampleStore.open(tmp_path / "s.sqlite")  # a restart forgets nothing
    for _ in range(3):
        assert come(WINDOW, 0) < 1
    assert come(WINDOW, 0.7) >= 1
    assert train(2) is None
    come(4 * WINDOW, 0.7)
    train(3)
    assert come(2 * WINDOW, 0.7) < 1
    assert come(WINDOW, 0) >= 1
    (arrivals,) = store._connection.execute("SELECT count(*) FROM arrival").fetchone()
    assert arrivals <= REFERENCE + WINDOW
    store.close()


def test_a_training_that_does_not_bring_the_loss_back_is_no_new_measure_for_a_while(tmp_path):
    rng, store = np.random.default_rng(0), SampleStore.open(tmp_path / "s.sqlite")

    def train(number, scale):
        store.pin(TrainingRound("r", number, 1))
        store.mark_trained(TrainingRound("r", number, 1), rng.exponential(scale, 200))
        return float(store.reference_losses.mean())

    good = train(1, 1.0)
    assert train(2, 1.05) != good, "as before, or lower: the newest count"
    good = train(3, 0.9)
    for number in range(4, 4 + PATIENCE):
        assert train(number, 3.0) == good
    assert train(4 + PATIENCE, 3.0) > 2.5, "so that is what the samples are like now"
    assert train(5 + PATIENCE, 1.0) < 1.5
    assert train(6 + PATIENCE, 3.0) < 1.5, "patience is for each time anew"
    store.close()
