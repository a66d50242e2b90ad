"""Diagnostics: the figures that a method reports about its own mechanism, for each update and each round."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

MAX_DIAGNOSTICS = 32  # largest number of diagnostics that one method may declare
MOST_PARTS = 256  # largest number of parts (layers, rates) that one figure may have

Figure = float | Mapping[str, float]
"""A number, or one number for each named part, such as a layer or a rate."""


@dataclass(frozen=True)
class Diagnostic:
    """Description of one figure that shows whether a mechanism of the method acts.

    A faulty figure never stops a round. The record leaves out a figure that is undeclared, not finite, or has
    more than `MOST_PARTS` parts, and the log gets one line. All figures are left out if the method raises an
    error.

    Attributes:
        name: stable name in snake case, unique within the method.
        title: label for people, in lower case.
        about: one sentence on what the figure is and how it should move; it names the paper's symbol.
        unit: unit of the figure; `share` is a number in [0, 1] that is shown in percent.
        of: `update` for a figure of a device's update, `round` for one of the coordinator's state after a
            round.
        by: name of the parts in the plural ("layers"); None if the figure is one number.
    """

    name: str
    title: str
    about: str
    unit: Literal["share", "count", "number"]
    of: Literal["update", "round"]
    by: str | None = None


def declared_diagnostics(method: object) -> tuple[Diagnostic, ...]:
    """Return the valid diagnostics that a method or its class declares; invalid ones are left out."""
    declared = getattr(method, "diagnostics", ())
    found: dict[str, Diagnostic] = {}
    for one in declared if isinstance(declared, tuple) else ():
        if isinstance(one, Diagnostic) and re.fullmatch(r"[a-z][a-z0-9_]{0,40}", str(one.name)):
            found.setdefault(one.name, one)
    return tuple(found.values())[:MAX_DIAGNOSTICS]
