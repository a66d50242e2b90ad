"""How much an update changed what its device was sent."""

from typing import Any

import numpy as np

from fleetune.coordinator.rounds.engine_state import Member
from fleetune.coordinator.run.partial_updates import share_done
from fleetune.coordinator.run.replies import ArrivingReply
from fleetune.protocols.model.spec import ModelSpec
from fleetune.protocols.update.base import Base
from fleetune.protocols.update.patch import patches_in


def change_made(arriving: ArrivingReply, member: Member, spec: ModelSpec) -> float | None:
    """`rms_change`, over the share of the local training that the device did; None: not known."""
    reply, delivered = arriving.reply, arriving.delivered
    if reply.update is None or delivered is None:
        return None
    change = rms_change(reply.update, delivered.base, spec)
    return None if change is None else change / share_done(member, reply.measures)


def rms_change(update: Any, brought: Base, spec: ModelSpec) -> float | None:
    """Root of the mean square, over the entries that `update` holds and its task has `brought`; None: there
    is no such entry.
    """
    squares, entries = 0.0, 0
    for patch in patches_in(update):
        mask = patch.selection.mask(spec)
        held = brought.held[mask]
        change = (patch.values - brought.values[mask])[held].astype(np.float64)
        squares, entries = squares + float(change @ change), entries + change.size
    return float(np.sqrt(squares / entries)) if entries else None
