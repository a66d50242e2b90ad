"""Declines a round or a run: makes the message for the coordinator, and logs the reason."""

import logging

from fleetune.protocols.errors import FleetuneError, TrainingDiverged
from fleetune.protocols.wire.messages import Decline, TransferKey, readable

log = logging.getLogger(__name__)


def declined(key: TransferKey, what: str, problem: BaseException) -> Decline:
    """Log `problem`, and return the message for the coordinator.

    Args:
        key: transfer key of the task or of the run's enrolment.
        what: name of the declined thing, for the log.
        problem: the reason; an unexpected exception is logged with its traceback.
    """
    if isinstance(problem, FleetuneError):
        reason = readable(str(problem))
        log.warning("%s: declined: %s", what, reason)
    else:
        reason = f"unexpected {type(problem).__name__}; the device's log has more"
        log.error("%s: declined", what, exc_info=problem)
    diverged = isinstance(problem, TrainingDiverged)
    return Decline(key.run, key.round, key.attempt, reason, diverged)
