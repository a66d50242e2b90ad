"""A reply that is here in whole: given to the run controller, and what the device is told of it."""

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
    """Give a reply to the run controller; why it is refused (None: it is not), and what became of it.

    A reply that does not count is acknowledged too, so that it is not offered again; refused is only what is
    damaged or implausible.

    Args:
        session: the session of the device that sent it.
        arrived: the reply.
        controller: of the run.
        rejected: logs a reply that is refused.
        timer: seconds that never jump.
        clock: of the run.

    Raises:
        StoreError: it cannot be kept.
    """
    actual, turn = session.actual(timer()), RoundAttempt.of(arrived.offer.transfer_key)
    try:
        outcomes = controller.receive(
            session.device, turn, arrived.payload(), actual, clock(), predicted=session.predicted
        )
    except StoreError:
        raise
    except Exception as fault:  # noqa: BLE001 - whatever it is, one device must not stop the others
        reason = rejected.blame(session.device, fault)  # nothing was kept
        outcomes = controller.handle(Declined(session.device, *turn, reason, replied=True), clock())
        return reason, outcomes
    for outcome in outcomes:
        if isinstance(outcome, ReplyRefused):
            problem = outcome.problem
            line = f"refused: {session.device}: reply to round {turn.number}: {problem}"
            rejected.say(logging.WARNING, session.device, line)
            return readable(f"{type(problem).__name__}: {problem}"), outcomes
    return None, outcomes
