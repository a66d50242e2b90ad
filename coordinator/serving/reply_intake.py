"""A reply that is here in whole: kept, or refused, and what the device and the engine are told of it."""

import logging
from collections.abc import Callable

from fleetune.coordinator.rounds.engine_state import Turn
from fleetune.coordinator.rounds.events import Declined
from fleetune.coordinator.rounds.orders import Order
from fleetune.coordinator.run.run_controller import RunController
from fleetune.coordinator.serving.peers import Peer
from fleetune.coordinator.serving.refusals import Refusals
from fleetune.protocols.errors import PacketError, StoreError
from fleetune.protocols.wire.inbox import Arrived
from fleetune.protocols.wire.messages import readable


def take_in(
    peer: Peer,
    arrived: Arrived,
    controller: RunController,
    refusals: Refusals,
    *,
    timer: Callable[[], float],
    clock: Callable[[], float],
) -> tuple[str | None, list[Order]]:
    """Give a reply to the run controller; why it is refused (None: it is kept), and what is left to do.

    Args:
        peer: that it came from.
        arrived: the reply.
        controller: of the run.
        refusals: told of one that is refused.
        timer: seconds that never jump.
        clock: of the run.

    Raises:
        StoreError: it cannot be kept.
    """
    actual, turn = peer.actual(timer()), Turn.of(arrived.offer.transfer_key)
    try:
        orders = controller.receive(
            peer.device, arrived.payload(), actual, clock(), turn=turn, predicted=peer.predicted
        )
    except PacketError as problem:
        line = f"refused: {peer.device}: reply to round {turn.number}: {problem}"
        refusals.say(logging.WARNING, peer.device, line)
        reason = readable(f"{type(problem).__name__}: {problem}")
        return reason, controller.turn_away(peer.device, turn, problem, clock())
    except StoreError:
        raise
    except Exception as fault:  # noqa: BLE001 - whatever it is, one device must not stop the others
        reason = refusals.blame(peer.device, fault)  # nothing was kept
        return reason, controller.handle(Declined(peer.device, *turn, reason), clock())
    return None, orders
