"""Combine rules: how the coordinator combines the updates of a round, independently of the method.

To add a rule (such as a clipped mean, a median or a secure sum), write a `protocols.update.combine.Combine`
and add it to `COMBINES`.
"""

from collections.abc import Mapping
from typing import Any

from fleetune.protocols.errors import SettingError
from fleetune.protocols.method.method import Method
from fleetune.protocols.update.combine import MEAN, Combine

COMBINES: Mapping[str, Combine] = {"mean": MEAN}


def combine_for(method: Method[Any, Any, Any, Any], name: str = "mean") -> Combine:
    """Return the combine rule with this name.

    Raises:
        SettingError: no rule has this name, or the method does not use it.
    """
    if name not in COMBINES:
        raise SettingError(f"{name!r} is no way to combine updates; there are {', '.join(COMBINES)}")
    if COMBINES[name] is not MEAN and not method.combines:
        raise SettingError(
            f"{type(method).__name__} does not combine updates into one mean, so that {name!r} would not act:"
            ' use "mean", or another method'
        )
    return COMBINES[name]
