"""The latest adoption decisions. Only `edge-agent models` reads them."""

import logging

import msgspec

from fleetune.edge_agent.state.deployed_files import DeployedFiles
from fleetune.protocols.errors import StoreError

log = logging.getLogger(__name__)

MOST_DECISIONS = 50


class Decision(msgspec.Struct, frozen=True, omit_defaults=True):
    """The decision about a round's candidates, for the owner.

    Attributes:
        run, round, final_evaluation: the round of the decision.
        version: the version deployed from then on.
        why: the reason, in one line.
        loss, error: validation loss of the best candidate, and its standard error.
        lead, lead_error: loss of the local-only model minus that loss, and the standard error.
    """

    run: str
    round: int
    final_evaluation: bool
    version: int
    why: str
    loss: float | None = None
    error: float | None = None
    lead: float | None = None
    lead_error: float | None = None

    @property
    def round_attempt(self) -> tuple[str, int, bool]:
        """Run, round, and True for the final evaluation."""
        return self.run, self.round, self.final_evaluation


def write_decision(files: DeployedFiles, decision: Decision) -> None:
    """Append a decision, or replace the one of the same round. A failed write is only logged."""
    earlier = [one for one in read_decisions(files) if one.round_attempt != decision.round_attempt]
    try:
        files.decisions.write(msgspec.json.encode([*earlier, decision][-MOST_DECISIONS:]))
    except StoreError as problem:
        log.warning("the decision is not stored: %s", problem)


def read_decisions(files: DeployedFiles) -> list[Decision]:
    """Return the latest decisions, oldest first; empty if there are none or they are damaged."""
    try:
        data = files.decisions.read()
        return [] if data is None else msgspec.json.decode(data, type=list[Decision])
    except (StoreError, msgspec.MsgspecError):
        return []
