"""A sample before it is stored: checked, converted to the stored types, and identified by its content."""

import hashlib
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fleetune.edge_agent.datasets.train_test_split import draws_of_digests, input_digest

MAX_SAMPLE_BYTES = 2**26
MAX_NAME = 200
MAX_TARGETS = 100_000
UNLABELLED, NUMBERS = -1, -2  # stand in for a class number: no label yet, and a label of numbers

Kind = Literal[
    "not-numbers", "not-finite", "empty", "too-large", "shape", "label", "class", "name", "unknown", "file",
    "message", "late", "iterator", "broker", "disk", "clock",
]  # fmt: skip
"""Kinds of problems that are counted: of samples, files and messages, and of broker, disk and clock."""


class BadSample(ValueError):  # noqa: N818 - reads as the verdict on a sample
    """A sample, file or message is refused; `kind` is counted, and the message is logged."""

    def __init__(self, kind: Kind, words: str) -> None:
        super().__init__(words)
        self.kind: Kind = kind


@dataclass(frozen=True)
class Label:
    """A label in its stored form.

    Attributes:
        y: a class from 0, int64, shape (); or numbers, float32, shape (k,).
    """

    y: NDArray[np.generic]

    @property
    def class_number(self) -> int:
        """The class; `NUMBERS` if the label consists of numbers."""
        return int(self.y) if self.y.dtype == np.int64 else NUMBERS

    @property
    def data(self) -> bytes:
        return self.y.astype(self.y.dtype.newbyteorder("<")).tobytes()

    @classmethod
    def read(cls, class_number: int, data: bytes) -> "Label":
        """Read a label from the columns `class` and `y` of its row."""
        if class_number >= 0:
            return cls(np.asarray(class_number, np.int64))
        return cls(np.frombuffer(data, "<f4").astype(np.float32))


@dataclass(frozen=True)
class Sample:
    """A valid sample.

    Attributes:
        x: the input, uint8 or float32, C-contiguous, any shape but ().
        label: the label; None if there is none yet.
        name: the owner's name for it, by which a label can be added later; None if it has none.
        digest: digest of `x` alone, 16 bytes. Copies of an input count as one sample, whatever their labels.
        for_test, for_validation: draws in [0, 1) that decide the split, see `datasets.train_test_split`. They
            do not depend on the label, so a late label moves no sample to another part.
        rank: number in [0, 1), also derived from the content but independent of the draws. The reservoir
            keeps the lowest ranks.
    """

    x: NDArray[np.generic]
    label: Label | None
    name: str | None
    digest: bytes
    for_test: float
    for_validation: float
    rank: float

    @property
    def data(self) -> bytes:
        return self.x.astype(self.x.dtype.newbyteorder("<"), copy=False).tobytes()


def make_sample(x: Any, y: Any = None, name: object = None) -> Sample:
    """Check a sample and convert it to the stored types: uint8 stays, other numbers become float32.

    Args:
        x: the input, an array of numbers.
        y: the label, see `make_label`; None if there is none yet.
        name: the owner's name for it, see `make_name`; None if it has none.

    Raises:
        BadSample: the input has no numbers, NaN, infinity or too many numbers, or label or name are not
            valid.
    """
    inputs = _inputs(x)
    label = None if y is None else make_label(y)
    named = None if name is None else make_name(name)
    digest = input_digest(inputs)
    for_test, for_validation = draws_of_digests(digest)
    rank = int.from_bytes(hashlib.blake2b(digest, digest_size=8, person=b"fleetune-keep").digest(), "little")
    return Sample(
        inputs, label, named, digest, float(for_test[0]), float(for_validation[0]), (rank >> 11) * 2.0**-53
    )


def _inputs(x: Any) -> NDArray[np.generic]:
    try:
        found = np.asarray(x)
    except (ValueError, TypeError, OverflowError):
        raise BadSample(
            "not-numbers", "the rows of a sample have different lengths; they must be equally long"
        ) from None
    if found.dtype.kind not in "buif":
        raise BadSample("not-numbers", f"a sample holds {found.dtype}; it must hold numbers")
    if not found.ndim or not found.size:
        raise BadSample("empty", f"a sample has shape {found.shape}; it must be a non-empty array")
    if found.size > MAX_SAMPLE_BYTES // 4:
        raise BadSample(
            "too-large", f"a sample has {found.size} numbers; at most {MAX_SAMPLE_BYTES // 4} are allowed"
        )
    if found.dtype != np.uint8:
        with np.errstate(over="ignore", invalid="ignore"):
            found = found.astype(np.float32)
        if not np.isfinite(found).all():
            raise BadSample("not-finite", "a sample has NaN or infinite numbers; check the sensor")
    return np.ascontiguousarray(found)


def make_label(y: Any) -> Label:
    """Check a label and convert it to its stored form.

    A whole number is a class. A number with a fraction, or several numbers, become float32, shape (k,).

    Raises:
        BadSample: the label is a negative whole number, NaN, infinite or not a number.
    """
    try:
        found = np.asarray(y)
    except (ValueError, TypeError, OverflowError):
        raise BadSample("label", "a label must be a number or a row of numbers") from None
    if found.dtype.kind not in "buif" or found.ndim > 1 or not 0 < found.size <= MAX_TARGETS:
        raise BadSample(
            "label",
            f"a label holds {found.dtype}, shape {found.shape}; it must be a number or a row of numbers",
        )
    if found.ndim == 0 and found.dtype.kind in "bui":
        if not 0 <= int(found) < 2**31:
            raise BadSample("label", f"label {found} is out of range; classes count from 0")
        return Label(found.astype(np.int64))
    with np.errstate(over="ignore", invalid="ignore"):
        numbers = np.atleast_1d(found).astype(np.float32)
    if not np.isfinite(numbers).all():
        raise BadSample("label", "a label has NaN or infinite numbers; it must be finite")
    return Label(numbers)


def make_name(name: object) -> str:
    """Check a sample's name, a text or a whole number, and return it as text. Raises BadSample."""
    text = str(name) if isinstance(name, str | int) else ""
    if not text or len(text) > MAX_NAME or not text.isprintable():
        raise BadSample("name", f"a sample's id must be 1 to {MAX_NAME} printable characters")
    return text
