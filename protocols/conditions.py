"""How a board is just now, as far as it can tell."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from fleetune.protocols.bounds import NumBytes, Share

Power = Literal["mains", "charging", "battery"]


class Conditions(Struct, frozen=True, omit_defaults=True):
    """What an owner's policy is judged by; None: not known, which is never the same as 0 or False.

    Attributes:
        memory_bytes: what the agent's process may take altogether: the smallest of what is available and
            every limit set on it (cgroup, RLIMIT_AS), counting what it has already.
        power: from the mains, without or with a battery that is charging, or from a battery.
        battery: charge, 0..1; None also where there is none.
        watts: drawn by the whole board.
        celsius: of its hottest thermal zone.
        throttled: whether it runs slower than it could, for heat or low voltage.
        metered: whether traffic costs money.
    """

    memory_bytes: NumBytes | None = None
    power: Power | None = None
    battery: Share | None = None
    watts: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    celsius: Annotated[float, Meta(ge=-300, le=10_000)] | None = None
    throttled: bool | None = None
    metered: bool | None = None


UNKNOWN = Conditions()
