"""Samples of several arrays become rows."""

import numpy as np
import pytest
from tests.helpers.errors import raises

from fleetune.edge_agent.datasets.sources import from_python, load
from fleetune.edge_agent.training.device_data import check_fits, split
from fleetune.protocols.errors import DataError
from fleetune.protocols.model.interface import Interface, ModelInput
from fleetune.protocols.model.spec import ModelSpec

IMAGE, AGE, Y = np.full((4, 1, 2, 2), 51, np.uint8), np.arange(4, dtype=np.uint8), np.arange(4) % 2
ROWS = np.column_stack([np.arange(4), np.full((4, 4), 0.2)]).astype(np.float32)


def test_arrays_stand_in_the_order_of_their_names_and_images_are_scaled(tmp_path):
    np.savez(tmp_path / "d.npz", y=Y, image=IMAGE, age=AGE, test=[0, 0, 0, 1])
    found = load("npz:d.npz", tmp_path)
    np.testing.assert_allclose(found.x, ROWS)
    assert found.test.tolist() == [False, False, False, True]
    same = from_python("f returned", "f", ({"image": IMAGE, "age": AGE}, Y))
    np.testing.assert_array_equal(same.x, found.x)
    np.testing.assert_array_equal(same.y, Y)


@pytest.mark.parametrize(
    ("arrays", "named"),
    [
        ({"image": IMAGE, "age": AGE[:3]}, ("age has 3", "image has 4 samples")),
        ({"ids": np.full((4, 1), 2**25)}, ("ids", "16,777,216")),
        ({"names": np.array(["a", "b", "c", "d"])}, ("names holds <U1",)),
    ],
)
def test_arrays_that_cannot_become_rows_are_named(arrays, named):
    with raises(DataError, *named):
        from_python("f returned", "f", (arrays, Y))


SPEC = ModelSpec(
    "m", (), (), (5,), 2, interface=Interface((ModelInput("age", ()), ModelInput("image", (1, 2, 2))))
)


@pytest.mark.parametrize(
    ("arrays", "named"),
    [
        ({"image": IMAGE, "age": AGE[:, None]}, None),
        ({"image": IMAGE[:, 0], "age": AGE}, None),
        ({"image": AGE, "age": IMAGE}, ("age 1x2x2", "image 1x2x2")),
        ({"image": IMAGE, "zage": AGE}, ("zage", "age (a number)")),
    ],
)
def test_arrays_are_held_against_the_models_inputs(arrays, named):
    data = split(from_python("f returned", "f", {**arrays, "y": Y, "test": [0, 0, 0, 1]}), 0.2, 0)
    if named is None:
        assert check_fits(data, SPEC).x_train.shape == (3, 5)
        return
    with raises(DataError, *named):
        check_fits(data, SPEC)


def test_named_arrays_are_not_for_a_model_of_one():
    data = split(from_python("f returned", "f", {"a": AGE, "b": AGE, "y": Y, "test": [0, 0, 0, 1]}), 0.2, 0)
    with raises(DataError, "a (a number)", "x"):
        check_fits(data, ModelSpec("m", (), (), (2,), 2))


def test_no_samples_are_one_line():
    with raises(DataError, "x", "empty"):
        from_python("f returned", "f", ({"image": IMAGE[:0], "age": AGE[:0]}, Y[:0]))


def test_a_single_array_of_another_name_is_a_mistake():
    with raises(DataError, "x_train", "image", remedy="x"):
        from_python("f returned", "f", {"image": IMAGE, "y": Y})
