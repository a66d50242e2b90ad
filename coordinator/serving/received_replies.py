"""Hands a complete reply to the run controller."""

import logging
from collections.abc import Callable

from fleetune.coordinator.rounds.engine_state import RoundAttempt
from fleetune.coordinator.rounds.events import Declined
from fleetune.coordinator.run.round_execution import Outcome
from fleetune.coordinator.run.run_controller import RunController
from fleetune.coordinator.run.run_events import ReplyRefused
from fleetune.coordinator.serving.device_sessions import DeviceSession
from fleetune.coordinator.serving.rejected_messages import RejectedMessages
from fleetune.protocols.errors import StoreError
from fleetune.protocols.wire.inbox import Arrived
from fleetune.protocols.wire.messages import readable


def receive_reply(
    session: DeviceSession,
    arrived: Arrived,
    controller: RunController,
    rejected: RejectedMessages,
    *,
    timer: Callable[[], float],
    clock: Callable[[], float],
) -> tuple[str | None, list[Outcome]]:
    """Pass a complete reply to the run controller; return the reason of a refusal (or None) and the outcomes.

    Only damaged or implausible replies are refused. A reply that does not count, e.g. a late one, is
    acknowledged
    like any other, so that the device does not offer it again.

    Args:
        session: the session of the device that sent the reply.
        arrived: the reply.
        controller: the run controller.
        rejected: logs a reply that is refused.
        timer: a monotonic clock, in seconds.
        clock: the run's clock, in seconds.

    Raises:
        StoreError: the reply cannot be stored.
    """
    actual, turn = session.actual(timer()), RoundAttempt.of(arrived.offer.transfer_key)
    try:
        outcomes = controller.receive(
            session.device, turn, arrived.payload(), actual, clock(), predicted=session.predicted
        )
    except StoreError:
        raise
    except Exception as fault:  # noqa: BLE001 - whatever it is, one device must not stop the others
        reason = rejected.blame(session.device, fault)  # the run controller stored nothing of it
        outcomes = controller.handle(Declined(session.device, *turn, reason, replied=True), clock())
        return reason, outcomes
    for outcome in outcomes:
        if isinstance(outcome, ReplyRefused):
            problem = outcome.problem
            line = f"refused: {session.identity}: reply to round {turn.number}: {problem}"
            rejected.say(logging.WARNING, session.device, line)
            return readable(f"{type(problem).__name__}: {problem}"), outcomes
    return None, outcomes
