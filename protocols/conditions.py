"""The current conditions of a board, as far as they can be measured."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from fleetune.protocols.bounds import NumBytes, Share

Power = Literal["mains", "charging", "battery"]


class Conditions(Struct, frozen=True, omit_defaults=True):
    """The board's conditions, with which an owner's policy is compared; None if unknown.

    Attributes:
        memory_bytes: memory that the agent's process may use in total: the smallest of available memory and
            all limits (cgroup, RLIMIT_AS), including what it already uses.
        power: mains without a battery, mains while charging, or battery.
        battery: charge, 0..1; None also without a battery.
        watts: power draw of the whole board.
        celsius: temperature of its hottest thermal zone.
        throttled: True if heat or low voltage slows it down.
        metered: True if traffic costs money.
    """

    memory_bytes: NumBytes | None = None
    power: Power | None = None
    battery: Share | None = None
    watts: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    celsius: Annotated[float, Meta(ge=-300, le=10_000)] | None = None
    throttled: bool | None = None
    metered: bool | None = None


UNKNOWN = Conditions()
