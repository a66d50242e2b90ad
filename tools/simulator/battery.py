"""A simulated device's battery, which nobody charges."""

from dataclasses import dataclass, field


@dataclass
class Battery:
    """What is left, and what drains it.

    Attributes:
        capacity_j: when full.
        charge: what is left of it, 0..1.
        idle_w: drawn all the time; what work takes comes on top.
    """

    capacity_j: float
    charge: float
    idle_w: float
    _seen_at: float = field(default=0.0, repr=False)

    @property
    def is_empty(self) -> bool:
        return self.charge <= 0

    def drain(self, now: float, joules: float = 0.0) -> None:
        """By `joules` of work, and by idling since it was last drained."""
        idle_j = self.idle_w * max(0.0, now - self._seen_at)
        self._seen_at = max(now, self._seen_at)
        self.charge = max(0.0, self.charge - (joules + idle_j) / self.capacity_j)
