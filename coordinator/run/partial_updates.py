"""Updates of devices that did a share of the local training only, made comparable to those of others.

FedNova (Wang et al. 2020, arXiv:2007.07481): what a device's values moved by is divided by its steps, and the
mean of that is multiplied by the mean number of steps, so that who took more of them does not draw the model
towards itself. Here a device's own number of steps, by its samples, counts as ever (FedAvg's weighting, and
that of the papers); normalised is the share of them alone:

    value <- task + (value - task) * s / share

`s` is the mean, weighted by samples, of the shares that were asked for; `share` is what a device says that it
did, no more than was asked of it, and no less than is ever asked of anybody: who says that it did next to
nothing counts no more than who was asked for little. Where all did the same nothing changes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec import UNSET

from fleetune.coordinator.rounds.engine_state import EngineState, Member
from fleetune.coordinator.tasks.assignment import Tasks
from fleetune.protocols.method.choice import LOCAL_WORKS
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.model.spec import ModelSpec
from fleetune.protocols.update.base import Base
from fleetune.protocols.update.patch import patches_in
from fleetune.protocols.wire.payloads import Measures, Reply


@dataclass(frozen=True)
class Normalising:
    """Of the updates of a round.

    Attributes:
        state: of the engine, as it is now.
        tasks: of the open round.
        spec: the model.
    """

    state: Callable[[], EngineState]
    tasks: Tasks
    spec: ModelSpec

    def mean_share(self, devices: tuple[DeviceId, ...]) -> float:
        """Of the local training that was asked for, weighted by samples; 1 where nobody holds any."""
        members = [self.state().member(device) for device in devices]
        samples = [one.report.num_samples if one.report else 0 for one in members]
        asked = sum(count * share_asked(one) for count, one in zip(samples, members, strict=True))
        return asked / sum(samples) if sum(samples) else 1.0

    def apply(self, reply: Reply[Any], mean_share: float) -> None:
        """Make an update, which has just been read, comparable to the others; in place."""
        factor = mean_share / share_done(self.state().member(reply.device), reply.measures)
        if factor != 1:
            move(reply.update, self.tasks.planned[reply.device], factor, self.spec)


def share_asked(member: Member) -> float:
    """Of the local training, of a device's latest task."""
    return 1.0 if member.dealt is None else member.dealt.local_work


def share_done(member: Member, measures: Measures) -> float:
    """Of the local training, as far as a device is believed."""
    asked = share_asked(member)
    told = 1.0 if measures.local_work is UNSET else measures.local_work
    return min(asked, max(told, LOCAL_WORKS[0]))


def move(update: Any, task: Any, factor: float, spec: ModelSpec) -> None:
    """Move an update's values, in place, to `factor` times as far from what its task brought."""
    brought = Base.of_task(task, spec)
    for patch in patches_in(update):
        mask = patch.selection.mask(spec)
        start = np.where(
            brought.held[mask], brought.values[mask], patch.values
        )  # else nothing is known of it
        values = start + np.float32(factor) * (patch.values - start)
        object.__setattr__(patch, "values", values.astype(np.float32))  # it has just been read
