"""Declines a round or a run: a message for the coordinator, and a line in the log."""

import logging

from fleetune.protocols.errors import FleetuneError, TrainingDiverged
from fleetune.protocols.wire.messages import Decline, TransferKey, readable

log = logging.getLogger(__name__)


def declined(key: TransferKey, what: str, problem: BaseException) -> Decline:
    """Log `problem`, and return the message for the coordinator.

    Args:
        key: the task, or the enrolment of a run.
        what: is declined, for the log.
        problem: why; an unexpected one is logged with its traceback.
    """
    if isinstance(problem, FleetuneError):
        reason = readable(str(problem))
        log.warning("%s: declined: %s", what, reason)
    else:
        reason = f"unexpected {type(problem).__name__}; the device's log has more"
        log.error("%s: declined", what, exc_info=problem)
    diverged = isinstance(problem, TrainingDiverged)
    return Decline(key.run, key.round, key.attempt, reason, diverged)
