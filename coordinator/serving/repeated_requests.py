"""Limits devices that repeat the same request endlessly."""

import logging
from collections.abc import Callable

from fleetune.coordinator.rounds.engine_state import NEVER, RoundAttempt
from fleetune.coordinator.serving.device_sessions import DeviceSession
from fleetune.coordinator.serving.rejected_messages import RejectedMessages

MAX_REQUESTS = 5  # answers to one request until the device connects again


class RepeatedRequests:
    """Counts the requests of devices, and stops answering a request that is repeated too often.

    Args:
        count: called to count a rejected request of a device, by kind.
        rejected: logs the first request that is not answered.
    """

    def __init__(self, count: Callable[[str, str], None], rejected: RejectedMessages) -> None:
        self._count = count
        self._rejected = rejected

    def is_too_many(self, session: DeviceSession, what: str, attempt: RoundAttempt = NEVER) -> bool:
        """Count a request; True if the device has now made it more than `MAX_REQUESTS` times.

        The count restarts when the device reconnects, and at each new attempt at a round.
        """
        times = session.count_request(what, attempt)
        if times <= MAX_REQUESTS:
            return False
        self._count("asked-too-often", session.device)
        if times == MAX_REQUESTS + 1:
            line = (
                f"{session.identity} asked {MAX_REQUESTS} times {what}; it gets no answer until it connects"
                " again"
            )
            self._rejected.say(logging.WARNING, session.device, line)
        return True
