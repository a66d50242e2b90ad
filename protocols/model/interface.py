"""The inputs and the output of a model whose samples consist of several arrays.

Everywhere else a sample is one array. So the arrays of a sample travel and are stored as one row of float32:
each is flattened, and they stand side by side in the alphabetical order of their names.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from fleetune.protocols.bounds import MOST_IDS, Label

MOST_INPUTS = 8
InputType = Literal["float32", "bool", "int64"]
InputName = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,99}\Z")]
Size = Annotated[int, Meta(ge=1, le=2**32)]


@dataclass(frozen=True)
class ModelInput:
    """One of several inputs of a model.

    Attributes:
        name: the name of the argument, or of the entry of a dict, that the model receives.
        shape: its shape in one sample.
        type: its type. Rows hold True as 1 and False as 0.
        vocabulary: an int64 input is in 0..vocabulary-1. None: it is not looked up in a table.
    """

    name: InputName
    shape: Annotated[tuple[Size, ...], Meta(max_length=8)]
    type: InputType = "float32"
    vocabulary: Annotated[int, Meta(ge=1, le=MOST_IDS)] | None = None

    @property
    def size(self) -> int:
        """Its numbers in one sample."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Interface:
    """How samples enter a model, and where its output has the logits.

    Attributes:
        inputs: the inputs by name in alphabetical order; empty: the model takes one array.
        output: the entry of the output that has the logits; "": the output itself, or its entry `logits`.
    """

    inputs: Annotated[tuple[ModelInput, ...], Meta(max_length=MOST_INPUTS)] = ()
    output: Label = ""

    @property
    def places(self) -> Iterator[tuple[ModelInput, slice]]:
        """Yield each input with its place in a row."""
        start = 0
        for one in self.inputs:
            yield one, slice(start, start + one.size)
            start += one.size

    @property
    def size(self) -> int:
        """The numbers of a row; 0 if the model takes one array."""
        return sum(one.size for one in self.inputs)

    def __str__(self) -> str:
        """Return the inputs in one line."""
        return listed_shapes((one.name, one.shape) for one in self.inputs)

    def problem(self, rows: NDArray[np.generic]) -> str | None:
        """Return what is wrong with samples, shape (n, size); None if they fit the inputs."""
        for one, place in self.places:
            values = rows[:, place]
            if one.type == "float32" or not values.size:
                continue
            low, high = values.min(), values.max()
            if one.type == "bool" and not np.isin(values, (0, 1)).all():
                return f"{one.name} has values other than 0 and 1; the model takes a mask there"
            if (np.floor(values) != values).any():
                return f"{one.name} has fractions; the model takes whole numbers there"
            if one.vocabulary is not None and not 0 <= low <= high < one.vocabulary:
                wrong = int(low if low < 0 else high)
                return f"{one.name} has {wrong}; the model knows 0..{one.vocabulary - 1} there"
        return None

    def valid(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return any numbers, shape (n, size), as samples that fit the inputs."""
        rows = rows.copy()
        for one, place in self.places:
            if one.type == "bool":
                rows[:, place] = rows[:, place] > 0
            elif one.type == "int64":
                rows[:, place] = np.floor(np.abs(rows[:, place]) * 1000) % (one.vocabulary or 1)
        return rows


PLAIN = Interface()


def listed_shapes(arrays: Iterable[tuple[str, tuple[int, ...]]]) -> str:
    """Return names and shapes in one line, such as `image 1x28x28, age (a number)`."""
    return ", ".join(f"{name} {'x'.join(map(str, shape)) or '(a number)'}" for name, shape in arrays)


def interface_of_shapes(shapes: Mapping[str, tuple[int, ...]], output: str = "") -> Interface:
    """Return the interface of a model that takes arrays of these shapes; all are float32."""
    return Interface(tuple(ModelInput(name, tuple(shapes[name])) for name in sorted(shapes)), output)
