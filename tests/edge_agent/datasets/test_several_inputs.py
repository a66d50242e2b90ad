"""Samples of several arrays become rows."""

import numpy as np
import pytest
from tests.helpers.errors import raises

from fleetune.edge_agent.datasets.sources import from_python, load
from fleetune.protocols.errors import DataError

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


def test_a_single_array_of_another_name_is_a_mistake():
    with raises(DataError, "x_train", "image", remedy="x"):
        from_python("f returned", "f", {"image": IMAGE, "y": Y})
