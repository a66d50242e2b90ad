"""What may be seen of a method's inner workings: the figures that it tells of each update and each round."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Figure = float | Mapping[str, float]
"""A number, or one for each of several parts by their names: layers, rates."""


@dataclass(frozen=True)
class Internal:
    """One figure of a method's inner workings, by which a reader sees that a mechanism acts.

    Attributes:
        name: stable, in snake case, unique within the method.
        title: for people, in lower case.
        about: what it is and what it should do, in one sentence; the paper's symbol stands here.
        unit: `share` is a number in [0, 1] shown in percent.
        of: an `update`, as a device sent it, or the coordinator's state after a `round`.
        by: what its parts are, in the plural ("layers"); None: it is one number.
    """

    name: str
    title: str
    about: str
    unit: Literal["share", "count", "number"]
    of: Literal["update", "round"]
    by: str | None = None
