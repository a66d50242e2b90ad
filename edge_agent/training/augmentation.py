"""Data augmentation of training batches, chosen by `[training] augment`.

An augmentation takes a batch as the model gets it (scaled float32 inputs, or int64 token ids), shape (n,
...), with its labels and a random generator. It returns a batch and labels of the same shapes. The random
draws depend only on the run's seed, the round, the device and the step.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from fleetune.edge_agent.training.backend import InputArray, LabelArray
from fleetune.protocols.errors import FleetuneError, SettingError
from fleetune.protocols.model.spec import ModelSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.user_code import as_line, user_module

Augment = Callable[[InputArray, LabelArray, np.random.Generator], tuple[InputArray, LabelArray]]
Batch = tuple[InputArray, LabelArray]

CROP_SHARE = 8  # share of an image's side: the usual 4 of 32 pixels, and 3 of 28


def augmentation_of(
    names: tuple[str, ...], spec: ModelSpec
) -> Callable[[InputArray, LabelArray, Key], Batch]:
    """Return a function that applies the named augmentations in order.

    The n-th augmentation draws from the n-th child of the given key.

    Raises:
        SettingError: an augmentation does not fit such samples, or cannot be loaded.
    """
    steps = [_find(name, spec) for name in names]

    def augmented(x: InputArray, y: LabelArray, key: Key) -> Batch:
        for number, step in enumerate(steps):
            x, y = step(x, y, key.child(number).generator())
        return x, y

    return augmented


def flip(x: InputArray, y: LabelArray, draws: np.random.Generator) -> Batch:
    """Mirror each image left to right with probability 1/2."""
    mirrored = draws.random(len(x)) < 0.5
    x[mirrored] = x[mirrored, ..., ::-1]
    return x, y


def crop(x: InputArray, y: LabelArray, draws: np.random.Generator) -> Batch:
    """Shift each image by up to an eighth of its height and width and fill the border by reflection.

    Zagoruyko and Komodakis 2016, section 3, shift by up to 4 of 32 pixels.
    """
    height, width = x.shape[-2:]
    rims = [max(1, side // CROP_SHARE) for side in (height, width)]
    padded = np.pad(x, [(0, 0), (0, 0), *((rim, rim) for rim in rims)], mode="reflect")
    windows = sliding_window_view(padded, (height, width), axis=(2, 3))
    top, left = (draws.integers(0, 2 * rim + 1, len(x)) for rim in rims)
    return np.ascontiguousarray(windows[np.arange(len(x)), :, top, left]), y


OF_IMAGES: dict[str, Augment] = {"flip": flip, "crop": crop}


def _find(name: str, spec: ModelSpec) -> Augment:
    if name in OF_IMAGES:
        if len(spec.input_shape) != 3 or min(spec.input_shape[1:]) < 2:
            raise SettingError(
                f"training.augment: {name} needs images of at least 2 by 2 pixels, shape (channels, height,"
                f" width); the model takes {spec.input_shape}"
            )
        return OF_IMAGES[name]
    module, _, attribute = name.partition(":")
    try:
        function = getattr(user_module(module), attribute)
    except Exception as problem:  # a user's file may raise anything
        raise SettingError(f"training.augment: cannot load {name!r}: {as_line(problem)}") from problem
    return partial(_checked, name, function, spec.num_classes)


def _checked(
    name: str, function: Augment, num_classes: int, x: InputArray, y: LabelArray, draws: np.random.Generator
) -> Batch:
    """Call a user's augmentation, which may change the batch in place, and check what it returns.

    Raises:
        SettingError: the function failed, or returned something else than a batch of the same kind.
    """
    shapes, dtypes = (x.shape, y.shape), (x.dtype, y.dtype)
    try:
        found: list[Any] = [np.asarray(one) for one in function(x, y, draws)]
    except FleetuneError:
        raise
    except Exception as problem:  # a user's function may raise anything
        raise SettingError(f"training.augment: {name!r} failed: {as_line(problem)}") from problem
    if [one.shape for one in found] != list(shapes):
        gave = " and ".join(str(one.shape) for one in found)
        raise SettingError(
            f"training.augment: {name!r} returned {gave} for samples {shapes[0]} and labels {shapes[1]};"
            " expected (x, y) of the same shapes"
        )
    for what, one, dtype in zip(("samples", "labels"), found, dtypes, strict=True):
        if not np.can_cast(one.dtype, dtype, "same_kind"):
            raise SettingError(
                f"training.augment: {name!r} returned {what} of type {one.dtype}; expected {dtype}"
            )
        if one.dtype.kind == "f" and not np.isfinite(one).all():
            raise SettingError(
                f"training.augment: {name!r} returned NaN or infinite {what}; expected finite numbers"
            )
    if dtypes[1].kind == "i" and not 0 <= found[1].min() <= found[1].max() < num_classes:
        raise SettingError(f"training.augment: {name!r} returned labels outside 0..{num_classes - 1}")
    inputs, labels = (
        one.astype(dtype, order="C", copy=False) for one, dtype in zip(found, dtypes, strict=True)
    )
    return inputs, labels
