"""How the coordinator combines the updates of a round: chosen here, outside the method.

A new way (a clipped mean, a median, a secure sum) is a `protocols.update.combine.Combine` and one entry of
`COMBINES`.
"""

from collections.abc import Mapping
from typing import Any

from fleetune.protocols.errors import SettingError
from fleetune.protocols.method.method import Method
from fleetune.protocols.update.combine import MEAN, Combine

COMBINES: Mapping[str, Combine] = {"mean": MEAN}


def combine_for(method: Method[Any, Any, Any, Any], name: str = "mean") -> Combine:
    """The named way to combine updates. Raises SettingError: there is none, or the method does not use it."""
    if name not in COMBINES:
        raise SettingError(f"{name!r} is no way to combine updates; there are {', '.join(COMBINES)}")
    if COMBINES[name] is not MEAN and not method.combines:
        raise SettingError(
            f"{type(method).__name__} does not combine updates into one mean, so that {name!r} would not act:"
            ' use "mean", or another method'
        )
    return COMBINES[name]
