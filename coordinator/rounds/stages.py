"""The stages of a run and every transition between them, as one table that the round engine follows."""

from collections.abc import Mapping
from typing import Literal

Stage = Literal["waiting", "training", "aggregating", "evaluating", "finished"]
"""waiting: no round is open. training: participants work. aggregating: the driver combines their updates.
evaluating: the final evaluation is open. finished: the run is over."""

Transition = Literal[
    "round opens",
    "replies suffice",
    "updates aggregated",
    "updates did not aggregate",
    "round abandoned",
    "round rolled back",
    "evaluation opens",
    "run ends",
    "run reopened",
]

TRANSITIONS: Mapping[Stage, Mapping[Transition, Stage]] = {
    "waiting": {
        "round opens": "training",
        "evaluation opens": "evaluating",
        "run ends": "finished",
    },
    "training": {
        "replies suffice": "aggregating",
        "round abandoned": "waiting",
        "round rolled back": "waiting",
    },
    "aggregating": {
        "updates aggregated": "waiting",
        "updates did not aggregate": "training",
    },
    "evaluating": {
        "run ends": "finished",
        "run reopened": "waiting",
    },
    "finished": {
        "run reopened": "waiting",
    },
}


def after(stage: Stage, transition: Transition) -> Stage:
    """Return the stage that follows `stage`. Raises ValueError if the table has no such transition."""
    if transition not in TRANSITIONS[stage]:
        raise ValueError(
            f"stage {stage!r} has no transition {transition!r}; use one of {sorted(TRANSITIONS[stage])}"
        )
    return TRANSITIONS[stage][transition]
