"""How far each update moves the shared model: figures for the records, and the bound to which steps are
clipped (`round.robust = "clip"`).
"""

from collections.abc import Iterable
from typing import Self

from msgspec import Struct

from fleetune.coordinator.combine.measured_steps import typical_rms
from fleetune.coordinator.combine.round_combine import RoundCombine
from fleetune.coordinator.extensions.extension import ClosedRound, Extension, RunContext, StateSlot
from fleetune.coordinator.rounds.records import StepFigures
from fleetune.coordinator.store.run_store import RunStore

_STEPS = "steps"  # its name in the store


class Bounds(Struct, frozen=True):
    """Clip bounds: median RMS of the steps of the last closed round, and of the one before it."""

    last: float | None = None
    before: float | None = None


class UpdateSteps(Extension):
    """Records the steps of each round, and keeps the clip bound.

    Args:
        store: of the run.
        combine: combines and measures the updates.
    """

    slots = (_STEPS,)

    def __init__(self, store: RunStore, combine: RoundCombine) -> None:
        self._slot = StateSlot(store, _STEPS, Bounds, Bounds())
        self._combine, self._bounds = combine, Bounds()

    @classmethod
    def of_run(cls, run: RunContext) -> Self | None:
        return cls(run.store, run.combine) if run.method.combines else None

    def recall(self) -> None:
        self._use(self._slot.read())

    def after_round(self, closed: ClosedRound) -> Iterable[str]:
        if closed.record.final_evaluation:
            return ()
        steps = self._combine.steps()
        typical = typical_rms(tuple(steps.values()))
        for device, step in steps.items():
            ratio = None if typical is None else _short(step.rms / typical)
            cosine = None if step.cosine is None else _short(step.cosine)
            closed.amend(device, step=StepFigures(ratio, cosine, step.factor < 1))
        self._use(Bounds(typical, self._bounds.last))
        self._slot.write(self._bounds)
        return ()

    def after_rollback(self, number: int) -> None:  # noqa: ARG002 - only the last round is ever rolled back
        self._use(Bounds(self._bounds.before))
        self._slot.write(self._bounds)

    def _use(self, bounds: Bounds) -> None:
        self._bounds, self._combine.bound = bounds, bounds.last


def _short(figure: float) -> float:
    return float(f"{figure:.6g}")
