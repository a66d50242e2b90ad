"""Data augmentation: what the built-in ones do, and what a user's function may do wrong."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from fleetune.edge_agent.training.augmentation import OF_IMAGES, augmentation_of, crop, flip
from fleetune.protocols.errors import SettingError
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.device import AUGMENTATIONS

IMAGES, SAMPLES = SimpleNamespace(input_shape=(3, 16, 10), num_classes=4), (6, 3, 16, 10)


def batch(number=6):
    x = Key.of("augment").uniform(number * 3 * 16 * 10).astype(np.float32)
    return x.reshape(number, 3, 16, 10), np.arange(number) % 4


@pytest.fixture
def users(monkeypatch):
    """A user's module, into which a test writes."""
    module = ModuleType("usersaugment")
    monkeypatch.setitem(sys.modules, "usersaugment", module)
    return module


def augmented(*names, spec=IMAGES, seed=1):
    return augmentation_of(names, spec)(*batch(), Key(seed))


def test_those_that_run_toml_names_are_here():
    assert tuple(OF_IMAGES) == AUGMENTATIONS


def test_a_flip_mirrors_some_images_and_leaves_the_others():
    (before, labels), (x, y) = batch(200), flip(*batch(200), Key(1).generator())
    same = (x == before).all((1, 2, 3))
    mirrored = (x == before[..., ::-1]).all((1, 2, 3))
    assert (same ^ mirrored).all()
    assert 70 < mirrored.sum() < 130
    np.testing.assert_array_equal(y, labels)


def test_a_crop_moves_each_image_by_up_to_an_eighth_and_reflects_the_rim():
    (before, _), (x, _) = batch(300), crop(*batch(300), Key(1).generator())
    padded = np.pad(before, [(0, 0), (0, 0), (2, 2), (1, 1)], mode="reflect")
    found = set()
    for image, whole in zip(x, padded, strict=True):
        places = [
            (top, left)
            for top in range(5)
            for left in range(3)
            if (image == whole[:, top : top + 16, left : left + 10]).all()
        ]
        assert len(places) == 1
        found.update(places)
    assert len(found) == 15  # every place occurs
    assert x.flags.c_contiguous


def test_what_is_drawn_follows_from_the_key_alone():
    first, again, other = (
        augmented("crop", "flip"),
        augmented("crop", "flip"),
        augmented("crop", "flip", seed=2),
    )
    assert first[0].tobytes() == again[0].tobytes() != other[0].tobytes()


def test_a_users_function_gets_the_batch_and_a_generator(users):
    users.noisy = lambda x, y, draws: (x + draws.normal(0, 0.1, x.shape), y)  # float64: it becomes float32
    x, y = augmented("usersaugment:noisy")
    assert x.dtype == np.float32
    assert 0.05 < np.std(x - batch()[0]) < 0.2
    np.testing.assert_array_equal(y, batch()[1])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x, y, draws: 1 / 0, "failed: ZeroDivisionError: division by zero"),
        (lambda x, y: (x, y), "failed: TypeError: "),
        (lambda x, y, draws: x, "returned "),
        (
            lambda x, y, draws: (x[:, :, 1:], y),
            f"returned (6, 3, 15, 10) and (6,) for samples {SAMPLES} and labels (6,); expected (x, y) of the",
        ),
        (lambda x, y, draws: (x[:-1], y[:-1]), "returned (5, 3, 16, 10) and (5,)"),
        (lambda x, y, draws: (x * np.nan, y), "returned NaN or infinite samples"),
        (lambda x, y, draws: (x, y + 0.5), "returned labels of type float64; expected int64"),
        (lambda x, y, draws: (x, y + 1), "returned labels outside 0..3"),
        (lambda x, y, draws: None, "failed: TypeError"),
    ],
)
def test_a_users_mistake_gets_one_line(users, function, message):
    users.wrong = function
    with pytest.raises(SettingError) as caught:
        augmented("usersaugment:wrong")
    text = str(caught.value)
    assert text.startswith("training.augment: 'usersaugment:wrong' ")
    assert message in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (
            "flip",
            (561,),
            "flip needs images of at least 2 by 2 pixels, shape (channels, height, width); the model",
        ),
        ("crop", (3, 8, 1), "crop needs images"),
        ("nosuchmodule:f", (3, 8, 8), "cannot load 'nosuchmodule:f': ModuleNotFoundError"),
        ("math:nosuch", (3, 8, 8), "cannot load 'math:nosuch': AttributeError"),
    ],
)
def test_one_that_is_not_there_gets_one_line(name, shape, message):
    with pytest.raises(SettingError) as caught:
        augmented(name, spec=SimpleNamespace(input_shape=shape, num_classes=4))
    assert str(caught.value).startswith(f"training.augment: {message}")
