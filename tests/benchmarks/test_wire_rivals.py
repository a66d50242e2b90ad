"""Each rival's step against a worked case."""

import numpy as np
import pytest
from benchmarks.wire.power_sgd import PowerSgd
from benchmarks.wire.rivals import eden, golomb_bits, hadamard, qsgd, stc
from benchmarks.wire.senders import SENDERS
from tests.conftest import tiny_spec

from fleetune.protocols.model.spec import ModelSpec, TensorSpec
from fleetune.protocols.randomness import Key

KEY = Key.of("wire")
DRAWN = KEY.generator().standard_normal(600).astype(np.float32)


def test_stc_sends_the_largest_with_their_mean_and_a_sign():
    step = np.array([0.5, -4, 1, 0, 2, -0.25, 0, 1], np.float32)
    sent, num_bytes = stc(0.25)(step, KEY)
    np.testing.assert_array_equal(sent, [0, -3, 0, 0, 3, 0, 0, 0])
    assert num_bytes == 4 + 2 * (golomb_bits(0.25) + 1) / 8


@pytest.mark.parametrize("density", [0.25, 1 / 50, 1 / 400])
def test_golombs_code_is_the_best_of_its_kind_for_such_distances(density):
    distances = np.arange(20_000)
    chances = density * (1 - density) ** distances
    lengths = [float(chances @ (distances // 2**bits + 1 + bits)) for bits in range(12)]
    assert golomb_bits(density) == pytest.approx(min(lengths), rel=1e-3)


def test_the_hadamard_transform_of_four_numbers():
    vector = np.array([1, 2, 3, 4], np.float32)
    np.testing.assert_array_equal(hadamard(vector), [5, -1, -2, 0])
    np.testing.assert_allclose(hadamard(hadamard(vector)), vector, rtol=1e-6)


def test_eden_sends_a_bit_an_entry_and_is_right_along_the_step():
    sent, num_bytes = eden(DRAWN, KEY)
    assert num_bytes == (4 + 512 / 8) + (4 + 256 / 8)  # 88 entries are padded to 256
    assert sent @ DRAWN == pytest.approx(DRAWN @ DRAWN, rel=1e-5)  # what its scale is for
    mean = np.mean([eden(DRAWN, KEY.child(draw))[0] for draw in range(300)], axis=0)
    assert np.linalg.norm(mean - DRAWN) < 0.1 * np.linalg.norm(DRAWN)


def test_qsgd_rounds_at_random_to_levels_of_the_norm_and_is_right_in_the_mean():
    step = np.array([3, 0, -4], np.float32)
    draws = np.array([qsgd(1)(step, KEY.child(draw))[0] for draw in range(1000)])
    assert set(np.unique(draws)) == {-5, 0, 5}
    np.testing.assert_allclose(draws.mean(axis=0), step, atol=0.25)
    sent, num_bytes = qsgd(5)(step, KEY)
    np.testing.assert_allclose(sent, step, rtol=1e-6)  # levels 3 and 4 of 5: nothing to round
    assert num_bytes == 4 + (1 + 3 + 3 + 5 + 2) / 8  # gamma of distances 1 and 2, levels 3 and 4, signs


def test_powersgd_sends_a_matrix_of_its_rank_exactly_and_small_tensors_whole():
    tensors = (
        TensorSpec("w", (6, 5), "weight", "w", ((), ())),
        TensorSpec("b", (3,), "bias", "b", ((),)),
    )
    spec = ModelSpec("m", tensors, (), (1,), 2)
    base, sender = np.zeros(33, np.float32), PowerSgd(1, spec)
    matrix = np.outer(np.arange(1, 7), np.arange(-2, 3))
    step = np.concatenate([matrix.reshape(-1), [7, 8, 9]]).astype(np.float32)
    arrived = sender.send(base, {0: step, 1: 3 * step}, {0: 0.25, 1: 0.75}, KEY)
    np.testing.assert_allclose(arrived.step, 2.5 * step, rtol=1e-5)
    assert arrived.num_bytes == 2 * 4 * (6 + 5 + 3)


def test_powersgd_keeps_what_its_rank_leaves_out():
    spec = ModelSpec("m", (TensorSpec("w", (4, 4), "weight", "w", ((), ())),), (), (1,), 2)
    base, sender = np.zeros(16, np.float32), PowerSgd(1, spec)
    step = np.diag([3.0, 2.0, 0.0, 0.0]).astype(np.float32).reshape(-1)
    sums = np.zeros(16)
    for number in range(30):
        values = step if number == 0 else base
        sums += sender.send(base, {0: values}, {0: 1.0}, KEY.child(number)).step
    np.testing.assert_allclose(sums, step, atol=1e-3)


@pytest.mark.parametrize(("name", "rounds"), [("int4", 4), ("eden", 40), ("stc-50", 160), ("sparse-20", 60)])
def test_what_a_sender_leaves_out_arrives_later(name, rounds):
    spec = tiny_spec()
    base, step = KEY.child("step").generator().standard_normal((2, spec.size)).astype(np.float32)
    sender, sums = SENDERS[name](spec), np.zeros(spec.size)
    for number in range(rounds):
        values = base + step if number == 0 else base
        sums += sender.send(base, {3: values}, {3: 1.0}, KEY.child(number)).step
    assert np.linalg.norm(sums - step) < 0.25 * np.linalg.norm(step)
