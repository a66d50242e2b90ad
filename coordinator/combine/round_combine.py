"""Combines the rounds of one run by its rule, and measures their updates."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fleetune.coordinator.combine.measured_steps import MeasuredSteps, Step
from fleetune.coordinator.combine.rules import RULES, RoundInputs
from fleetune.protocols.method.method import DeviceId, Method
from fleetune.protocols.model.spec import ModelSpec
from fleetune.protocols.settings.round import RoundSection
from fleetune.protocols.update.combine import MEAN, Combination, Combine


class RoundCombine:
    """Combines the rounds of one run.

    Args:
        settings: section [round] of the run.
        method: of the run.
        folder: of the run; updates that do not fit into memory lie there while they are combined.
        noisy: returns what combines a round in place of the rule, if only the noised sum may be known
            ([privacy] with central noise). Nothing is measured then.

    Attributes:
        bound: largest RMS of a step that is not clipped; None before it is known. The extension
            `coordinator.extensions.update_steps` keeps it.
    """

    def __init__(
        self,
        settings: RoundSection,
        method: Method[Any, Any, Any, Any],
        folder: Path | None = None,
        noisy: Callable[[], Combine] | None = None,
    ) -> None:
        self._noisy = noisy
        self._rule, self._max_hostile = RULES[settings.robust], settings.max_hostile
        self._method, self._folder = method, folder
        self.bound: float | None = None
        self._devices: Sequence[DeviceId] = ()
        self._measured: MeasuredSteps | None = None

    def of_round(self, planned: Any, devices: Sequence[DeviceId]) -> Combine:
        """Return what makes the combination of a round.

        Args:
            planned: the method's state, as `plan` returned it.
            devices: devices whose updates are combined, in their order.
        """
        self._devices, self._measured = devices, None
        if self._noisy is not None:
            return self._noisy()
        if not self._method.combines:
            return MEAN
        inputs = RoundInputs(self._method.shared_model(planned), self._max_hostile, self._folder)
        bound = self.bound if self._rule.clips else None

        def make(spec: ModelSpec) -> Combination:
            inner = self._rule.make(spec, inputs)
            self._measured = MeasuredSteps(inner, inputs.base, spec, len(devices), bound)
            return self._measured

        return make

    def steps(self) -> dict[DeviceId, Step]:
        """Return the steps of the round that was combined last, by device; empty if they are unknown.

        They are unknown if the method does not combine each update once, in their order.
        """
        found = [] if self._measured is None else self._measured.steps
        return dict(zip(self._devices, found, strict=True)) if len(found) == len(self._devices) else {}
