"""The owner's policy, watched while the agent runs: may it train just now?"""

import time
from collections.abc import Callable

from fleetune.edge_agent.budget.gauges import Gauges
from fleetune.edge_agent.budget.owner_policy import Policy, objection
from fleetune.firmware_profiles import Board

FRESH_S = 5.0  # how long a reading of the sensors holds


class Guard:
    """Asks the board's sensors for the policy's sake, now and then.

    Args:
        policy: of the owner.
        board: its profile.
        gauges: its sensors.
        clock: seconds that never jump.
    """

    def __init__(
        self, policy: Policy, board: Board, gauges: Gauges, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._policy, self._board, self._gauges, self._clock = policy, board, gauges, clock
        self._asked_at = float("-inf")
        self._objection: str | None = None

    @property
    def is_on(self) -> bool:
        """Whether the policy has conditions that come and go."""
        policy = self._policy
        asked = (policy.max_celsius, policy.min_battery, policy.max_battery_percent_per_hour)
        return policy.charging_only or policy.unmetered_only or any(key is not None for key in asked)

    def objection(self) -> str | None:
        """Why not to train now, in one line; None: nothing is against it. Any thread may ask."""
        now = self._clock()
        if self.is_on and now - self._asked_at >= FRESH_S:
            self._asked_at = now
            self._objection = objection(
                self._policy, self._gauges.conditions(), self._board, waiting=self._objection is not None
            )
        return self._objection
