"""What a device says when it will not do a round or a run: to the coordinator, and in its own log."""

import logging

from fleetune.protocols.errors import FleetuneError, TrainingDiverged
from fleetune.protocols.wire.messages import Decline, TransferKey, readable

log = logging.getLogger(__name__)


def declined(key: TransferKey, what: str, problem: BaseException) -> Decline:
    """Log `problem`, and put it into words for the coordinator.

    Args:
        key: the task, or the enrolment of a run.
        what: that is declined, for the log.
        problem: why; one that nobody foresaw is logged with its traceback.
    """
    if isinstance(problem, FleetuneError):
        reason = readable(str(problem))
        log.warning("%s: declined: %s", what, reason)
    else:
        reason = f"unexpected {type(problem).__name__}; the device's log has more"
        log.error("%s: declined", what, exc_info=problem)
    diverged = isinstance(problem, TrainingDiverged)
    return Decline(key.run, key.round, key.attempt, reason, diverged)
