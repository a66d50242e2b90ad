"""Clips the device's step and adds noise to it, in runs with [privacy] (docs/differential-privacy.md)."""

import logging
from dataclasses import replace
from typing import Any, Self

from msgspec import UNSET

from fleetune.edge_agent.extensions.extension import Extension, RunStart, TrainingResult, TrainingRound, U
from fleetune.protocols.errors import PacketForeign
from fleetune.protocols.model.spec import ModelSpec
from fleetune.protocols.private_noise import secret_normal
from fleetune.protocols.settings.privacy import PrivacySection
from fleetune.protocols.update.patch import Patch, patches_in
from fleetune.protocols.update.private_step import clipped, noised, task_values
from fleetune.protocols.wire.payloads import Measures

log = logging.getLogger(__name__)


class Privacy(Extension[int]):
    """Bounds what each update reveals, and counts the updates; its state is their number.

    The count is stored together with the reply. So a device that restarts sends the same reply again instead
    of a second one with new noise, and never answers more tasks than the run's budget allows.

    Args:
        section: the run's [privacy].
        spec: the run's model.
        most_tasks: largest number of updates; None for any number.
        simulated: True to draw the noise from keys, so that a simulation can be repeated.
    """

    name = "privacy"
    state_type = int

    def __init__(
        self, section: PrivacySection, spec: ModelSpec, most_tasks: int | None, *, simulated: bool
    ) -> None:
        self._section, self._spec, self._most, self._simulated = section, spec, most_tasks, simulated

    @classmethod
    def for_run(cls, start: RunStart) -> Self | None:
        enrolment, section = start.enrolment, start.enrolment.privacy
        if section is UNSET:
            return None
        most = None if enrolment.most_tasks is UNSET else enrolment.most_tasks
        if not start.simulated:
            where = "on this device" if section.is_local else "by the coordinator, which sees each step"
            log.info(
                "privacy: steps are clipped to %g; noise of %g times that is added %s",
                *(section.clip, section.noise_multiplier, where),
            )
        return cls(section, enrolment.spec, most, simulated=start.simulated)

    def before_training(self, round_: TrainingRound, state: int | None) -> None:
        if self._most is not None and (state or 0) >= self._most and not round_.attempt.final_evaluation:
            raise PacketForeign(
                f"this device has sent {state} updates, all that privacy.max_epsilon allows in this run"
            )

    def after_training(
        self,
        round_: TrainingRound,  # noqa: ARG002
        result: TrainingResult,  # noqa: ARG002
        state: int | None,
    ) -> int:
        return (state or 0) + 1

    def outgoing(self, round_: TrainingRound, task: Any, update: U) -> U:
        (sent,), (received,) = patches_in(task), patches_in(update)
        start = task_values(sent, received, self._spec)
        section = self._section
        if section.is_local:
            draw = round_.key.child("privacy").normal if self._simulated else secret_normal
            deviation = section.noise_multiplier * section.clip
            values = noised(received.values, start, section.clip, deviation, draw)
        else:
            values = clipped(received.values, start, section.clip)
        # the number of samples would be a weight, and is a figure of the device's data
        return replace(update, patch=Patch(received.selection, values), num_samples=1)  # type: ignore[type-var]

    def reported(self, measures: Measures) -> Measures:
        if self._section.scores:
            return measures
        return Measures(measures.num_samples, measures.num_test, local_work=measures.local_work)
