"""What a model takes of a store: which inputs, and which labels in which form."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fleetune.edge_agent.stream.sample import NUMBERS, UNLABELLED, BadSample, Label, Sample

Part = Literal["train", "validation", "test"]
PARTS: tuple[Part, ...] = ("train", "validation", "test")


@dataclass(frozen=True)
class SampleRequirements:
    """What a model takes of a store.

    Attributes:
        fits: whether inputs of this dtype (`"|u1"` or `"<f4"`) and shape do.
        labels: classes, int64 (n,); numbers, float32 (n, k); or optional: classes, where a sample without a
            label is of class 0.
        accepts: whether the model has a place for a label in that form, of one sample.
        test_fraction, validation_fraction: see `datasets.sample_roles`: a sample is tested on whose number
            is below the first, validated on of the others whose other number is below the second.
    """

    fits: Callable[[str, tuple[int, ...]], bool]
    labels: Literal["classes", "numbers", "optional"] = "classes"
    accepts: Callable[[NDArray[Any]], bool] = lambda _: True
    test_fraction: float = 0.3
    validation_fraction: float = 0.0

    def part(self, for_test: float, for_validation: float) -> Part:
        """What a sample is for, by its two numbers."""
        if for_test < self.test_fraction:
            return "test"
        return "validation" if for_validation < self.validation_fraction else "train"

    def label(self, class_number: int, y: bytes | None) -> NDArray[np.generic] | None:
        """The label of a sample, as it is kept, in the form that is wanted; None: it does not fit."""
        if class_number == UNLABELLED:
            return np.zeros((), np.int64) if self.labels == "optional" else None
        return self._in_form(Label.read(class_number, y or b""))

    def rejection(self, sample: Sample) -> BadSample | None:
        """Why the model can do nothing with a sample; None: it can, or its label may still come."""
        if not self.fits(sample.x.dtype.str, sample.x.shape):
            return BadSample("shape", f"a sample of shape {sample.x.shape}; the run's model takes another")
        return None if sample.label is None else self.label_rejection(sample.label)

    def label_rejection(self, label: Label) -> BadSample | None:
        """Why the model has no place for a label; None: it has."""
        if self._in_form(label) is not None:
            return None
        words = "numbers" if label.class_number == NUMBERS else str(label.class_number)
        return BadSample("class", f"label {words}: the run's model has no place for it")

    def _in_form(self, label: Label) -> NDArray[np.generic] | None:
        found = label.y
        if self.labels == "numbers":
            found = np.atleast_1d(found).astype(np.float32)
        elif found.dtype != np.int64:  # 1.0 is a class too, as tables write it
            if found.size != 1 or found[0] < 0 or found[0] != np.floor(found[0]):
                return None
            found = found[0].astype(np.int64)
        return found if self.accepts(found) else None
