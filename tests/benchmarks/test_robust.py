"""The benchmark of hostile devices: its attacks, its cells and its verdict."""

import numpy as np
import pytest
from benchmarks.robust import report
from benchmarks.robust.attacks import FORGED, SQUARE, TARGET, Step, hostile_devices, poisoned
from benchmarks.robust.cells import RULES, STAGES, cells

from fleetune.coordinator.combine import rules
from fleetune.edge_agent.datasets.dataset import Dataset
from fleetune.protocols.randomness import Key


def test_forged_steps():
    base, values = np.full(4, 1.0, np.float32), np.full(4, 1.5, np.float32)
    step = Step(base, values, Key(0))
    assert FORGED["sign-flip"](step).tolist() == [0.5] * 4
    assert FORGED["scaled-step"](step).tolist() == [-4.0] * 4
    assert FORGED["random"](step).shape == (4,)


def test_only_rows_of_hostile_devices_are_poisoned():
    dataset = Dataset(np.zeros((10, 1, 8, 8), np.uint8), np.arange(10))
    flipped = poisoned(dataset, np.array([0, 3]), "label-flip", 0)
    assert flipped.y.tolist() == [9, 1, 2, 6, 4, 5, 6, 7, 8, 9]
    rows = np.arange(4, 10)
    stamped = poisoned(dataset, rows, "backdoor", 0)
    changed = np.flatnonzero(stamped.x.any(axis=(1, 2, 3)))
    assert changed.size == 3
    assert set(changed) <= set(rows)
    assert (stamped.y[changed] == TARGET).all()
    assert (stamped.x[changed] == 255).sum() == 3 * SQUARE**2


def test_hostile_devices_are_the_share_asked_for():
    assert len(hostile_devices(20, 0.2, 0)) == 4
    assert hostile_devices(20, 0.2, 0) == hostile_devices(20, 0.2, 0)


def test_every_cell_has_a_name_of_its_own_and_a_rule_of_the_product():
    found = [cell for stage in STAGES for cell in cells(stage)]
    names = {cell.name for cell in found}
    assert len(names) == len(set(found))
    assert set(RULES) == set(rules.RULES)


def test_the_verdict_pairs_seed_and_device():
    def run(rule, seed, before):
        scores = {"a": before, "b": before + 0.1}
        cell = {
            "method": "fedavg",
            "setting": "har",
            "attack": "clean",
            "share": 0.0,
            "rule": rule,
            "seed": seed,
        }
        return {**cell, "before": scores, "personal": scores}

    runs = [run(rule, seed, 0.5 + 0.01 * seed - 0.02 * (rule == "clip")) for rule in RULES for seed in (0, 1)]
    [row, _] = report.default(runs)
    assert row[:5] == ["UCI HAR by person", "model that devices receive", 2, 4, -2.0]
    assert report.interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 2.4841, 2 + 2.4841), abs=1e-3)
