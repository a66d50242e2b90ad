"""A run at one moment, as the live view draws it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fleetune.coordinator.metrics.registry import AFTER, BEFORE
from fleetune.coordinator.metrics.summary import AdoptionSummary
from fleetune.coordinator.rounds.engine_state import Stage
from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.tasks.scores import ACCURACY, Score

Doing = Literal[
    "sending",
    "training",
    "evaluating",
    "receiving",
    "working",
    "declined",
    "replied",
    "ready",
    "left",
    "refused",
    "away",
]


@dataclass(frozen=True)
class DeviceLine:
    """One device as it stands.

    Attributes:
        doing: `receiving` its task or enrolment, `sending` its update; `working`: busy, nothing more known;
            `ready`: there and not asked; `left` early; `refused` the run; `away`: not reachable.
        fraction: of what it is doing, 0..1; None: not known.
        reason: why it declined or refused.
        why: why it took its ratio.
        before, after: accuracies of its last reply.
        actual_s, predicted_s: what its last reply's round took, and what it had expected; before any reply,
            what it expects of one.
        bytes_up, bytes_down: payload so far.
        metrics: of its last reply, by name, those that the live view shows.
    """

    device: DeviceId
    doing: Doing
    board: str = "generic"
    ratio: float | None = None
    fraction: float | None = None
    reason: str = ""
    before: float | None = None
    after: float | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    why: str = ""
    actual_s: float | None = None
    predicted_s: float | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundPoint:
    """Mean accuracies of one closed round's replies."""

    number: int
    before: float | None
    after: float | None


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment.

    Attributes:
        name, method: of the run.
        stage: of the engine.
        round, rounds, attempt: the open or coming round, of how many; None: the run is open.
        asked, replied, target: devices of the open round; it closes with `target` replies.
        waiting_for: devices that must be there for the coming round (stage waiting).
        round_left_s: until the open round's deadline; None: no round is open.
        round_span_s: what it was given; None: as the run's settings say.
        elapsed_s: since the run began.
        remaining_s: estimate until its end; None: too early to tell.
        curve: of the latest closed training rounds, ascending.
        diagnostics: of the method in the latest round, in one line; "" for none.
        bytes_up, bytes_down: payload of training so far.
        dense_up, dense_down: the same as whole models in float32.
        refused: what was refused, by kind.
        devices: all, by name.
        simulated: times are of the virtual clock.
        holds: why no round is open though devices may be there (its schedule, a pause); "" for nothing.
        problem: e.g. that the broker cannot be reached; "" for none.
        score: by which models are judged.
        adoption: what devices serve, as they told last; None: nobody did.
        versions: of the shared model that goes to canaries first, how they stand, in one line; "" for none.
    """

    name: str
    method: str
    stage: Stage
    round: int
    rounds: int | None
    attempt: int = 1
    asked: int = 0
    replied: int = 0
    target: int = 0
    waiting_for: int = 1
    round_left_s: float | None = None
    round_span_s: float | None = None
    elapsed_s: float = 0.0
    remaining_s: float | None = None
    curve: tuple[RoundPoint, ...] = ()
    diagnostics: str = ""
    bytes_up: int = 0
    bytes_down: int = 0
    dense_up: int = 0
    dense_down: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    devices: tuple[DeviceLine, ...] = ()
    simulated: bool = False
    holds: str = ""
    problem: str = ""
    score: Score = ACCURACY
    adoption: AdoptionSummary | None = None
    versions: str = ""


def point_of(record: RoundRecord) -> RoundPoint:
    """The mean accuracies of a closed round."""
    return RoundPoint(record.number, BEFORE.of_round(record), AFTER.of_round(record))
