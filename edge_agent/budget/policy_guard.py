"""Checks the owner's policy while the agent runs."""

import time
from collections.abc import Callable

from fleetune.edge_agent.budget.board_meter import BoardMeter
from fleetune.edge_agent.budget.owner_policy import Policy, reason_not_to_train
from fleetune.firmware_profiles import Board

FRESH_S = 5.0  # seconds for which a reading of the sensors is used


class PolicyGuard:
    """Checks if the policy lets the agent train, reading the sensors at most every `FRESH_S` seconds.

    Args:
        policy: the owner's policy.
        board: the board's profile.
        meter: reads the board's sensors.
        clock: monotonic seconds.
    """

    def __init__(
        self, policy: Policy, board: Board, meter: BoardMeter, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._policy, self._board, self._meter, self._clock = policy, board, meter, clock
        self._asked_at = float("-inf")
        self._reason_not_to_train: str | None = None

    @property
    def is_on(self) -> bool:
        """True if the policy has conditions that can change."""
        policy = self._policy
        asked = (policy.max_celsius, policy.min_battery, policy.max_battery_percent_per_hour)
        return policy.charging_only or policy.unmetered_only or any(key is not None for key in asked)

    def reason_not_to_train(self) -> str | None:
        """Return why the policy forbids training now, in one line.

        The result is None if training is allowed. Thread-safe.
        """
        now = self._clock()
        if self.is_on and now - self._asked_at >= FRESH_S:
            self._asked_at = now
            self._reason_not_to_train = reason_not_to_train(
                self._policy,
                self._meter.conditions(),
                self._board,
                waiting=self._reason_not_to_train is not None,
            )
        return self._reason_not_to_train
