"""A simulated device's battery, which nobody charges."""

from dataclasses import dataclass


@dataclass
class Battery:
    """What is left, and what drains it.

    Attributes:
        capacity_j: when full.
        charge: what is left of it, 0..1.
        idle_w: drawn all the time; what work takes comes on top.
        seen_at: when it was drained last.
    """

    capacity_j: float
    charge: float
    idle_w: float
    seen_at: float = 0.0

    @property
    def is_empty(self) -> bool:
        return self.charge <= 0

    def drain(self, now: float, joules: float = 0.0) -> None:
        """By `joules` of work, and by idling since it was last drained."""
        idle_j = self.idle_w * max(0.0, now - self.seen_at)
        self.seen_at = max(now, self.seen_at)
        self.charge = max(0.0, self.charge - (joules + idle_j) / self.capacity_j)
