"""FlatVectors here and on a card: where tensors lie, and which of the two counts."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from tests.helpers import card

from fleetune.coordinator.spec.spec_from_torch import draw
from fleetune.edge_agent.training.gpu.flat_vectors import FlatVectors
from fleetune.edge_agent.training.gpu.torch_device import PROCESSOR, torch_device
from fleetune.protocols.randomness import Key

SPEC, START = draw("resnet8", (3, 16, 16), 7, Key(3))


@pytest.fixture
def vectors():
    return FlatVectors(SPEC, torch_device(card.NAME), 3)


def test_each_tensor_begins_where_a_kernel_can_read(vectors):
    places = [vectors.places[tensor.name] for tensor in SPEC.tensors]
    assert all(place.start * 4 % 256 == 0 for place in places)
    assert [place.stop - place.start for place in places] == [tensor.size for tensor in SPEC.tensors]
    assert all(one.stop <= other.start for one, other in pairwise(places))


def test_on_the_processor_there_is_but_one_of_each():
    here = FlatVectors(SPEC, PROCESSOR, 2)
    assert here.torch_weights is here.weights
    assert here.places == SPEC.slices


def test_there_and_back_it_is_the_same(vectors):
    rows = torch.arange(2.0 * SPEC.size).reshape(2, -1)
    there = vectors.to_torch(rows.to(card.NAME))
    assert there.shape == (2, vectors.torch_size)
    assert torch.equal(vectors.from_torch(there).to(PROCESSOR), rows)
    assert there.to(PROCESSOR).sum() == rows.sum()  # 0 between tensors


def test_where_entries_end_there(vectors):
    assert vectors.torch_stop(0) == 0
    assert vectors.torch_stop(SPEC.size) == vectors.torch_size
    for name, place in SPEC.slices.items():
        assert vectors.torch_stop(place.start) == vectors.places[name].start
        assert vectors.torch_stop(place.start + 1) - vectors.places[name].start in (1, 64)


@pytest.mark.parametrize("rows", [[0, 1, 2], [1], [0, 2]])
def test_rows_that_are_here_are_brought_and_fetched(rows, vectors):
    for row in range(3):
        vectors.load(START * np.float32(row + 1), row)
    vectors.upload(rows)
    near = vectors.from_torch(vectors.torch_weights).to(PROCESSOR).numpy()
    for row in range(3):
        assert np.array_equal(near[row], START * (row + 1)) == (row in rows)
    vectors.torch_gradients.fill_(5.0)
    vectors.torch_weights.fill_(7.0)
    vectors.download(rows, statistics=True)
    for row in rows:
        assert (vectors.gradient_of(row) == 5).all()
        assert (vectors.weights_of(row)[SPEC.num_parameters :] == 7).all()
        assert np.array_equal(
            vectors.weights_of(row)[: SPEC.num_parameters], (START * (row + 1))[: SPEC.num_parameters]
        )


def test_a_row_that_is_held_there_counts_there_until_it_is_loaded_anew(vectors):
    vectors.load(START, 1)
    vectors.keep_on_gpu(1)
    vectors.torch_weights[1].mul_(2.0)
    vectors.upload([0, 1, 2])
    assert np.array_equal(vectors.weights_of(1), 2 * START)
    vectors.torch_gradients[1].fill_(3.0)
    vectors.download([0, 1], statistics=True)
    assert not vectors.gradients[1].any()
    assert vectors.gradient_of(1).sum() == 3 * SPEC.size
    vectors.store(1, START + 1, START)
    assert np.array_equal(vectors.weights_of(1), START + 1)
    vectors.load(START, 1)
    assert not vectors.is_on_gpu(1)
    assert np.array_equal(vectors.weights_of(1), START)
