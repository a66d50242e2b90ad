"""Removes one device from a method's state."""

import dataclasses
from typing import Any, TypeVar, cast

V = TypeVar("V")


def without(state: V, device: str) -> V:
    """Return a state without the dictionary entries and tuple elements that are this device's.

    Parts that do not name the device are the same objects as before, so arrays are not copied. Selections are
    no dataclasses and stay, because a layer may have the name of a device.
    """
    return cast("V", _without(state, device))


def _without(value: Any, device: str) -> Any:
    if isinstance(value, dict):
        return {name: _without(one, device) for name, one in value.items() if name != device}
    if isinstance(value, tuple):
        return tuple(_without(one, device) for one in value if not (isinstance(one, str) and one == device))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {one.name: getattr(value, one.name) for one in dataclasses.fields(value) if one.init}
        return dataclasses.replace(value, **{name: _without(part, device) for name, part in parts.items()})
    return value
