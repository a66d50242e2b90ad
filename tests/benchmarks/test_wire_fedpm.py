"""FedPM in `python -m benchmarks.wire`: frozen weights, what masks cost, and that chances are learned."""

import math

import numpy as np
import pytest
from benchmarks.wire.fedpm import FedPm, frozen_weights, mask_bytes
from benchmarks.wire.fleet import Fleet, Setting
from benchmarks.wire.run import Configuration, run_to_end

from fleetune.protocols.model.spec import ModelSpec, TensorSpec
from fleetune.protocols.randomness import Key

DIGITS = Setting("digits", '{ kind = "iid", samples = 200 }', "mlp", 3, 2, 12, 0.3)


def test_frozen_weights_are_of_one_size_a_layer():
    tensors = (
        TensorSpec("w", (6, 4), "weight", "a", ((), ())),
        TensorSpec("b", (6,), "bias", "a", ((),)),
        TensorSpec("v", (2, 16), "weight", "b", ((), ())),
    )
    found = frozen_weights(ModelSpec("m", tensors, (), (1,), 2), Key.of("fedpm").generator())
    np.testing.assert_allclose(np.abs(found), [math.e / 2] * 30 + [math.e / 4] * 32)
    assert 0 < (found > 0).mean() < 1


@pytest.mark.parametrize(("ones", "bits"), [(500, 1000), (0, 0), (1000, 0), (110, 499.9)])
def test_a_mask_takes_the_entropy_of_its_share_of_ones(ones, bits):
    mask = np.arange(1000) < ones
    assert mask_bytes(mask) == pytest.approx((bits + math.log2(1000)) / 8, rel=1e-3)


def test_chances_are_means_of_masks_until_priors_are_reset(monkeypatch):
    training = FedPm(Fleet(DIGITS, 0))
    size = training.fleet.spec.size
    monkeypatch.setattr(FedPm, "_mask", lambda self, device, number: np.arange(size) < number)
    ones = []
    for number in range(1, 4):  # two of three devices a round: priors are reset after two rounds
        weights, num_bytes = training.run_round(number)
        ones.append(np.abs(weights[:4]) / np.abs(training._frozen[:4]))
        assert num_bytes == 2 * mask_bytes(np.arange(size) < number)
    np.testing.assert_allclose(ones[0], [0.99, 0.01, 0.01, 0.01], rtol=1e-5)
    np.testing.assert_allclose(ones[1], [0.99, 0.5, 0.01, 0.01], rtol=1e-5)
    np.testing.assert_allclose(ones[2], [0.99, 0.99, 0.99, 0.01], rtol=1e-5)


def test_a_fleet_learns_by_masks_alone():
    fleet = Fleet(DIGITS, 0)
    run = run_to_end(fleet, "digits", Configuration("fedpm"))
    assert run.accuracy[-1] > 0.6
    assert run.bytes_up[0] <= 2 * (fleet.spec.size + 20) / 8
    assert run_to_end(Fleet(DIGITS, 0), "digits", Configuration("fedpm")).accuracy == run.accuracy
