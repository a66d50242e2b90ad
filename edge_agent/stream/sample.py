"""One sample on its way into the store: checked, in the types that are kept, and known by its own content."""

import hashlib
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fleetune.edge_agent.datasets.train_test_split import draws_of_digests, input_digest

MAX_SAMPLE_BYTES = 2**26
MAX_NAME = 200
MAX_TARGETS = 100_000
UNLABELLED, NUMBERS = -1, -2  # in the place of a class: no label yet, and a label that is no class

Kind = Literal[
    "not-numbers", "not-finite", "empty", "too-large", "shape", "label", "class", "name", "unknown", "file",
    "message", "iterator", "broker", "disk", "clock",
]  # fmt: skip
"""What is counted: of bad samples, files and messages, and of a broker, a disk and a clock that fail us."""


class BadSample(ValueError):  # noqa: N818 - reads as the verdict on a sample
    """It cannot be kept: `kind` is what is counted, `str()` the line for the log."""

    def __init__(self, kind: Kind, words: str) -> None:
        super().__init__(words)
        self.kind: Kind = kind


@dataclass(frozen=True)
class Label:
    """A label as it is kept.

    Attributes:
        y: int64, shape (): a class, from 0; or float32, shape (k,): numbers.
    """

    y: NDArray[np.generic]

    @property
    def class_number(self) -> int:
        """The class; NUMBERS: it is none."""
        return int(self.y) if self.y.dtype == np.int64 else NUMBERS

    @property
    def data(self) -> bytes:
        return self.y.astype(self.y.dtype.newbyteorder("<")).tobytes()

    @classmethod
    def read(cls, class_number: int, data: bytes) -> "Label":
        """The label that these are kept of."""
        if class_number >= 0:
            return cls(np.asarray(class_number, np.int64))
        return cls(np.frombuffer(data, "<f4").astype(np.float32))


@dataclass(frozen=True)
class Sample:
    """A sample that may be kept.

    Attributes:
        x: uint8 or float32, C-contiguous, any shape but ().
        label: None: it may still come.
        name: the owner's own, by which a label finds it later; None: it has none.
        digest: of `x` alone, 16 bytes: copies of an input are one sample, whatever their labels.
        for_test, for_validation: in [0, 1), see `datasets.sample_roles`, with no label in the digest: what a
            sample is for never changes, nor when its label comes.
        rank: in [0, 1), of the digest too, but independent of those: the reservoir keeps the lowest.
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
    """Check a sample, and bring it into the types that are kept: uint8 stays, other numbers are float32.

    Raises:
        BadSample: it holds no numbers, NaN or infinity, nothing at all or too much; or see `make_label`,
            `make_name`.
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
        raise BadSample("not-numbers", "a sample's rows have different lengths") from None
    if found.dtype.kind not in "buif":
        raise BadSample("not-numbers", f"a sample holds {found.dtype}; it must hold numbers")
    if not found.ndim or not found.size:
        raise BadSample("empty", f"a sample has shape {found.shape}; it must be an array with numbers in it")
    if found.size > MAX_SAMPLE_BYTES // 4:
        raise BadSample("too-large", f"a sample of {found.size} numbers; at most {MAX_SAMPLE_BYTES // 4}")
    if found.dtype != np.uint8:
        with np.errstate(over="ignore", invalid="ignore"):
            found = found.astype(np.float32)
        if not np.isfinite(found).all():
            raise BadSample("not-finite", "a sample with NaN or infinite numbers")
    return np.ascontiguousarray(found)


def make_label(y: Any) -> Label:
    """A whole number from 0 is a class; numbers with fractions, or several, are float32, shape (k,).

    Raises:
        BadSample: it is negative and whole, NaN, infinite, or holds no numbers.
    """
    try:
        found = np.asarray(y)
    except (ValueError, TypeError, OverflowError):
        raise BadSample("label", "a label that is not an array of numbers") from None
    if found.dtype.kind not in "buif" or found.ndim > 1 or not 0 < found.size <= MAX_TARGETS:
        raise BadSample(
            "label", f"a label of {found.dtype}, shape {found.shape}; it must be a number, or a row"
        )
    if found.ndim == 0 and found.dtype.kind in "bui":
        if not 0 <= int(found) < 2**31:
            raise BadSample("label", f"label {found}; labels count from 0")
        return Label(found.astype(np.int64))
    with np.errstate(over="ignore", invalid="ignore"):
        numbers = np.atleast_1d(found).astype(np.float32)
    if not np.isfinite(numbers).all():
        raise BadSample("label", "a label with NaN or infinite numbers")
    return Label(numbers)


def make_name(name: object) -> str:
    """A sample's name: text or a whole number. Raises BadSample."""
    text = str(name) if isinstance(name, str | int) else ""
    if not text or len(text) > MAX_NAME or not text.isprintable():
        raise BadSample("name", f"a sample's id must be 1 to {MAX_NAME} printable characters")
    return text
