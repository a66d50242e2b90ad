"""Partial work: updates of devices that did only a share of the local training are made comparable.

FedNova (Wang et al. 2020, arXiv:2007.07481) divides what a device's values moved by by its number of steps.
It multiplies the mean of that by the mean number of steps, so that devices with more steps do not draw the
model towards themselves. Here a device's number of steps still counts by its samples, as in FedAvg and the
papers' weighting. Only the share of them is normalised:

    value <- task + (value - task) * s / share

`s` is the mean, weighted by samples, of the shares that were asked for. `share` is what a device reports that
it did: at most what was asked of it, and at least the smallest share that is ever asked for. A device that
reports next to nothing therefore counts no more than one that was asked for little. Where all devices did the
same, nothing changes.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Self

import numpy as np
from msgspec import UNSET

from fleetune.coordinator.extensions.extension import Contribution, Extension, RoundUpdates, RunContext
from fleetune.coordinator.rounds.engine_state import EngineState, Member
from fleetune.protocols.method.choice import LOCAL_WORKS
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.model.spec import ModelSpec
from fleetune.protocols.update.patch import patches_in
from fleetune.protocols.update.reference_model import ReferenceModel
from fleetune.protocols.wire.payloads import Measures


class PartialWork(Extension):
    """Moves updates of partial local work as if every device had done the mean share.

    Args:
        state: of the round engine.
        spec: the model.
    """

    def __init__(self, state: EngineState, spec: ModelSpec) -> None:
        self._state, self._spec = state, spec

    @classmethod
    def of_run(cls, run: RunContext) -> Self | None:
        is_used = run.settings.objective.normalise and run.method.starts_from_task
        return cls(run.state, run.method.spec) if is_used else None

    def weigh(self, updates: Iterable[Contribution], round_: RoundUpdates) -> Iterator[Contribution]:
        mean_share = self.mean_share(round_.devices)
        for one in updates:
            reply = one.reply
            factor = mean_share / share_done(self._state.member(reply.device), reply.measures)
            if factor != 1:
                move(reply.update, round_.tasks[reply.device], factor, self._spec)
            yield one

    def mean_share(self, devices: tuple[DeviceId, ...]) -> float:
        """Mean share of local training planned for these devices, weighted by samples; 1 without samples."""
        members = [self._state.member(device) for device in devices]
        samples = [one.report.num_samples if one.report else 0 for one in members]
        asked = sum(count * share_asked(one) for count, one in zip(samples, members, strict=True))
        return asked / sum(samples) if sum(samples) else 1.0


def share_asked(member: Member) -> float:
    """The share of the local training that a device's latest task asked for."""
    return 1.0 if member.assigned is None else member.assigned.local_work


def share_done(member: Member, measures: Measures) -> float:
    """The share of the local training that a device did, within what it was asked for."""
    asked = share_asked(member)
    reported = 1.0 if measures.local_work is UNSET else measures.local_work
    return min(asked, max(reported, LOCAL_WORKS[0]))


def move(update: Any, task: Any, factor: float, spec: ModelSpec) -> None:
    """Move an update's values, in place, to `factor` times as far from what its task brought."""
    brought = ReferenceModel.of_task(task, spec)
    for patch in patches_in(update):
        mask = patch.selection.mask(spec)
        start = np.where(
            brought.held[mask], brought.values[mask], patch.values
        )  # else nothing is known of it
        values = start + np.float32(factor) * (patch.values - start)
        object.__setattr__(patch, "values", values.astype(np.float32))  # it has just been read
