"""Counts every update once, and clips it before it is combined, in runs with [privacy]."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Self

from msgspec import structs

from fleetune.coordinator.extensions.extension import ClosedRound, Extension, RoundUpdates, RunContext
from fleetune.coordinator.extensions.privacy.accountant import epsilon_of
from fleetune.coordinator.rounds.engine_state import EngineState, RoundAttempt
from fleetune.protocols.errors import PacketCorrupt
from fleetune.protocols.model.spec import ModelSpec
from fleetune.protocols.settings.privacy import PrivacySection
from fleetune.protocols.update.patch import Patch, patches_in
from fleetune.protocols.update.private_step import clipped, task_values
from fleetune.protocols.wire.payloads import Reply


class PrivateSteps(Extension):
    """Bounds each update's part in the sum, whatever its device, encoding or residual made of it.

    Args:
        section: the run's [privacy].
        spec: the run's model.
        state: state of the round engine, which counts the devices' tasks.
    """

    def __init__(self, section: PrivacySection, spec: ModelSpec, state: EngineState) -> None:
        self._section, self._spec, self._state = section, spec, state

    @classmethod
    def of_run(cls, run: RunContext) -> Self | None:
        section = run.settings.privacy
        return None if section is None else cls(section, run.method.spec, run.state)

    def weigh(self, replies: Iterator[Reply[Any]], round_: RoundUpdates) -> Iterator[Reply[Any]]:
        for reply in replies:
            sent: Any = reply.update
            update = replace(sent, num_samples=1)
            if not self._section.is_local:
                update = self._clipped(update, round_.tasks[reply.device])
            weighed = replace(reply, update=update)
            del reply, sent, update  # before the next one is read
            yield weighed
            del weighed

    def after_round(self, closed: ClosedRound) -> Iterable[str]:
        record, state = closed.record, self._state
        # the engine may have opened the next round already, whose tasks count as well
        opened = RoundAttempt(record.number, record.attempt) if state.stage == "training" else None
        tasks = (
            member.tasks - (opened is not None and member.asked > opened) for member in state.members.values()
        )
        epsilon = epsilon_of(self._section, max(tasks, default=0))
        closed.record = structs.replace(record, epsilon=epsilon)
        return ()

    def _clipped(self, update: Any, task: Any) -> Any:
        (sent,), (received,) = patches_in(task), patches_in(update)
        try:
            start = task_values(sent, received, self._spec)
        except PacketCorrupt:  # a hostile device chose other entries: it counts as a step of zero
            return replace(update, patch=sent)
        values = clipped(received.values, start, self._section.clip)
        return replace(update, patch=Patch(received.selection, values))
