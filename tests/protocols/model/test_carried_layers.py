"""What a new version of a model keeps of the one before it: whole layers of the same name and shapes."""

from dataclasses import replace

import numpy as np
from tests.conftest import tiny_spec

from fleetune.protocols.model.carried_layers import carry_over


def taken(before, after):
    """What `after` keeps, old values being 1 and new ones 0."""
    return carry_over(before, np.ones(before.size, np.float32), after, np.zeros(after.size, np.float32))


def with_layer(spec, name, called):
    tensors = [
        replace(one, layer=called, name=one.name.replace(name, called, 1)) if one.layer == name else one
        for one in spec.tensors
    ]
    return replace(spec, tensors=tuple(tensors))


def test_the_same_model_is_kept_in_whole(spec, weights):
    fresh = np.zeros_like(weights)
    found = carry_over(spec, weights, spec, fresh)
    assert found.weights.tobytes() == weights.tobytes()
    assert (found.new, found.gone) == ((), ())
    assert not fresh.any(), "what it was given is as it was"


def test_a_layer_with_one_tensor_of_another_shape_begins_anew_in_whole(spec):
    wider = tiny_spec(hidden=7)
    found = taken(spec, wider)
    assert found.layers == ()
    assert not found.weights.any(), "the bias of 3 has the same shape, its layer has not"


def test_a_layer_of_another_name_begins_anew_and_running_statistics_go_with_their_layer(spec):
    head = with_layer(spec, "b", "head")
    found = taken(spec, head)
    assert found.layers == ("a", "n")
    assert found.words == (
        f"2 of 3 layers keep their weights ({found.num_carried} of {head.size} values); begins anew: head;"
        " no longer there: b"
    )
    for tensor in head.tensors:
        values = found.weights[head.slices[tensor.name]]
        assert (values == (tensor.layer != "head")).all(), tensor.name


def test_layers_are_found_wherever_they_stand(spec, weights):
    turned = replace(spec, tensors=(*spec.tensors[3:5], *spec.tensors[:3], *spec.tensors[5:]))
    found = carry_over(spec, weights, turned, np.zeros(spec.size, np.float32))
    for tensor, view in turned.views(found.weights):
        assert (view.ravel() == weights[spec.slices[tensor.name]]).all()
