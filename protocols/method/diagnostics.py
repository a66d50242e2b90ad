"""What may be seen of a method's inner workings: the figures that it tells of each update and each round."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

MAX_DIAGNOSTICS = 32  # of one method
MOST_PARTS = 256  # of one figure

Figure = float | Mapping[str, float]
"""A number, or one for each of several parts by their names: layers, rates."""


@dataclass(frozen=True)
class Diagnostic:
    """One figure of a method's inner workings, by which a reader sees that a mechanism acts.

    What a method tells is never in a round's way: what is not declared, not finite or beyond `MOST_PARTS` is
    left out of the record with one line in the log, and so is all of it when telling raises.

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


def declared_diagnostics(method: object) -> tuple[Diagnostic, ...]:
    """What a method, or its class, tells; what is wrong of it is left out: a user's own may hold anything."""
    told = getattr(method, "diagnostics", ())
    found: dict[str, Diagnostic] = {}
    for one in told if isinstance(told, tuple) else ():
        if isinstance(one, Diagnostic) and re.fullmatch(r"[a-z][a-z0-9_]{0,40}", str(one.name)):
            found.setdefault(one.name, one)
    return tuple(found.values())[:MAX_DIAGNOSTICS]
