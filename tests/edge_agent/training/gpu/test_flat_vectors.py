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
    return FlatVectors(SPEC, torch_device(card.NAME))


def test_each_tensor_begins_where_a_kernel_can_read(vectors):
    places = [vectors.places[tensor.name] for tensor in SPEC.tensors]
    assert all(place.start * 4 % 256 == 0 for place in places)
    assert [place.stop - place.start for place in places] == [tensor.size for tensor in SPEC.tensors]
    assert all(one.stop <= other.start for one, other in pairwise(places))


def test_on_the_processor_there_is_but_one_of_each():
    here = FlatVectors(SPEC, PROCESSOR)
    assert here.torch_weights is here.weights
    assert here.places == SPEC.slices


def test_there_and_back_it_is_the_same(vectors):
    vector = torch.arange(1.0, SPEC.size + 1)
    there = vectors.to_torch(vector.to(card.NAME))
    assert there.shape == (vectors.torch_size,)
    assert torch.equal(vectors.from_torch(there).to(PROCESSOR), vector)
    assert there.to(PROCESSOR).count_nonzero() == SPEC.size  # 0 between tensors


def test_where_entries_end_there(vectors):
    assert vectors.torch_stop(0) == 0
    assert vectors.torch_stop(SPEC.size) == vectors.torch_size
    for name, place in SPEC.slices.items():
        assert vectors.torch_stop(place.start) == vectors.places[name].start
        assert vectors.torch_stop(place.start + 1) - vectors.places[name].start in (1, 64)


def test_vectors_that_are_here_are_brought_and_fetched(vectors):
    vectors.load(START)
    vectors.upload()
    assert np.array_equal(vectors.from_torch(vectors.torch_weights).to(PROCESSOR).numpy(), START)
    vectors.torch_gradient.fill_(5.0)
    vectors.torch_weights.fill_(7.0)
    vectors.download(statistics=True)
    assert (vectors.current_gradient() == 5).all()
    assert (vectors.current_weights()[SPEC.num_parameters :] == 7).all()
    assert np.array_equal(vectors.current_weights()[: SPEC.num_parameters], START[: SPEC.num_parameters])


def test_vectors_that_are_held_there_count_there_until_they_are_loaded_anew(vectors):
    vectors.load(START)
    vectors.keep_on_gpu()
    vectors.torch_weights.mul_(2.0)
    vectors.upload()
    assert np.array_equal(vectors.current_weights(), 2 * START)
    vectors.torch_gradient.fill_(3.0)
    vectors.download(statistics=True)
    assert not vectors.gradient.any()
    assert vectors.current_gradient().sum() == 3 * SPEC.size
    vectors.load(START)
    assert np.array_equal(vectors.current_weights(), START)
