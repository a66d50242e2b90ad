"""The samples that a model can use: which inputs it takes, and which labels in which form."""

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
    """The samples of a store that a model can use, and how they are split.

    Attributes:
        fits: called with dtype (`"|u1"` or `"<f4"`) and shape of an input; True if the model takes it.
        labels: form of the labels. "classes": int64, shape (n,). "numbers": float32, shape (n, k).
            "optional": classes, where a sample without a label has class 0.
        accepts: called with one label in that form; True if the model has a place for it.
        test_fraction: samples whose test draw is below it are test samples, see `datasets.train_test_split`.
        validation_fraction: other samples whose validation draw is below it are validation samples.
    """

    fits: Callable[[str, tuple[int, ...]], bool]
    labels: Literal["classes", "numbers", "optional"] = "classes"
    accepts: Callable[[NDArray[Any]], bool] = lambda _: True
    test_fraction: float = 0.3
    validation_fraction: float = 0.0

    def part(self, for_test: float, for_validation: float) -> Part:
        """Return the part of the split to which a sample with these draws belongs."""
        if for_test < self.test_fraction:
            return "test"
        return "validation" if for_validation < self.validation_fraction else "train"

    def label(self, class_number: int, y: bytes | None) -> NDArray[np.generic] | None:
        """Convert a stored label to the required form.

        Args:
            class_number: the stored class, `UNLABELLED` or `NUMBERS`.
            y: the stored label, little endian.

        Returns:
            The label; None if it does not fit.
        """
        if class_number == UNLABELLED:
            return np.zeros((), np.int64) if self.labels == "optional" else None
        return self._in_form(Label.read(class_number, y or b""))

    def rejection(self, sample: Sample) -> BadSample | None:
        """Return why the model cannot use a sample; None if it can, or the label is still missing."""
        if not self.fits(sample.x.dtype.str, sample.x.shape):
            return BadSample(
                "shape",
                f"a sample has shape {sample.x.shape}, which is not the shape that the run's model takes",
            )
        return None if sample.label is None else self.label_rejection(sample.label)

    def label_rejection(self, label: Label) -> BadSample | None:
        """Return why the model has no output for a label; None if it has one."""
        if self._in_form(label) is not None:
            return None
        words = "numbers" if label.class_number == NUMBERS else str(label.class_number)
        return BadSample("class", f"label {words}: the run's model has no output for it")

    def _in_form(self, label: Label) -> NDArray[np.generic] | None:
        found = label.y
        if self.labels == "numbers":
            found = np.atleast_1d(found).astype(np.float32)
        elif found.dtype != np.int64:  # 1.0 is a class too: tables write classes so
            if found.size != 1 or found[0] < 0 or found[0] != np.floor(found[0]):
                return None
            found = found[0].astype(np.int64)
        return found if self.accepts(found) else None
