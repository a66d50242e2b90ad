"""A payload over a simulated link: its bytes, and what the two sides say to each other about them.

The dialogue is `protocols.wire.transfer`'s: the payload goes right behind its offer, and its last byte is
acknowledged. A word takes the link's delay and no bytes.
"""

from dataclasses import dataclass

from fleetune.tools.links.link import Link


@dataclass(frozen=True)
class Transfer:
    """A payload on its way.

    Attributes:
        arrives_at: when its last byte is there.
        seconds: that it takes as the device counts them.
    """

    arrives_at: float
    seconds: float


def downloaded(link: Link, now_s: float, num_bytes: int) -> Transfer:
    """A payload for the device, which counts from the offer's coming."""
    arrives_at = link.finish_s(now_s, num_bytes, "down")
    return Transfer(arrives_at, arrives_at - now_s - link.delay_s)


def uploaded(link: Link, now_s: float, num_bytes: int) -> Transfer:
    """A payload of the device's, which counts until the last acknowledgement has come."""
    arrives_at = link.finish_s(now_s, num_bytes, "up")
    return Transfer(arrives_at, arrives_at - now_s + link.delay_s)
