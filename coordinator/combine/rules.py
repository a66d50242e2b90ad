"""The rules by name, and which of them a method can have.

To add a rule (such as a secure sum), write a `protocols.update.combine.Combination` and one entry in `RULES`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fleetune.coordinator.combine.coordinate_rules import RankedEntries, medians, trimmed_means
from fleetune.coordinator.combine.krum import Krum
from fleetune.protocols.errors import SettingError
from fleetune.protocols.method.method import Method
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.update.combine import Combination, CoveredMean


@dataclass(frozen=True)
class RoundInputs:
    """What a rule may use of a round and a run.

    Attributes:
        base: the shared model before the round, shape (spec.size,).
        max_hostile: share of a round's updates that may be hostile (`round.max_hostile`).
        folder: where updates are stored that do not fit into memory.
    """

    base: FlatArray
    max_hostile: float
    folder: Path | None = None


@dataclass(frozen=True)
class Rule:
    """A rule that combines updates.

    Attributes:
        make: returns an empty combination.
        clips: True if steps are clipped to the last round's median.
        compares_updates: True if it compares whole updates, which must then hold the same entries.
    """

    make: Callable[[ModelSpec, RoundInputs], Combination]
    clips: bool = False
    compares_updates: bool = False


def _mean(spec: ModelSpec, _: RoundInputs) -> Combination:
    return CoveredMean(spec)


def _median(spec: ModelSpec, inputs: RoundInputs) -> Combination:
    return RankedEntries(spec, medians, inputs.folder)


def _trimmed_mean(spec: ModelSpec, inputs: RoundInputs) -> Combination:
    return RankedEntries(spec, partial(trimmed_means, share=inputs.max_hostile), inputs.folder)


def _krum(spec: ModelSpec, inputs: RoundInputs) -> Combination:
    return Krum(spec, inputs.base, inputs.max_hostile, inputs.folder)


NONE = "none"
RULES: Mapping[str, Rule] = {
    "clip": Rule(_mean, clips=True),
    "median": Rule(_median),
    "trimmed-mean": Rule(_trimmed_mean),
    "krum": Rule(_krum, compares_updates=True),
    NONE: Rule(_mean),
}


def refusal(name: str, method: Method[Any, Any, Any, Any]) -> str | None:
    """Return why a method cannot have a rule; None if it can."""
    if name == NONE:
        return None
    if not method.combines:
        return method.not_combined
    if RULES[name].compares_updates and not method.sends_same_entries:
        return "its devices send different entries, so that whole updates cannot be compared"
    return None


def check_rule(settings: RunSettings, method: Method[Any, Any, Any, Any]) -> None:
    """Raise SettingError if the run's method cannot have `round.robust` or `round.quarantine`."""
    name = settings.round.robust
    if settings.round.quarantine is not None and not method.combines:
        raise SettingError(
            f"round.quarantine: {settings.method['name']} cannot have it, because {method.not_combined};"
            " leave it out"
        )
    why = refusal(name, method)
    if why is not None:
        usable = [f'"{other}"' for other in RULES if refusal(other, method) is None]
        raise SettingError(
            f'round.robust = "{name}": {settings.method["name"]} cannot have it, because {why};'
            f" use {' or '.join(usable)}"
        )
