"""What became of a device's candidates of late, for `edge-agent models`: nothing depends on it."""

import logging

import msgspec

from fleetune.edge_agent.state.deployed_files import DeployedFiles
from fleetune.protocols.errors import StoreError

log = logging.getLogger(__name__)

MOST_DECISIONS = 50


class Decision(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of a round's candidate, for people.

    Attributes:
        run, round, closing: when.
        version: that was served from then on.
        why: in one line.
        loss, error: validation loss of the candidate, and its standard error.
        lead, lead_error: how much lower it was than that of the model trained alone.
    """

    run: str
    round: int
    closing: bool
    version: int
    why: str
    loss: float | None = None
    error: float | None = None
    lead: float | None = None
    lead_error: float | None = None

    @property
    def turn(self) -> tuple[str, int, bool]:
        """In which it was decided."""
        return self.run, self.round, self.closing


def write_decision(files: DeployedFiles, decision: Decision) -> None:
    """Behind the others, in the place of one of the same turn. What cannot be written is said, and left."""
    earlier = [one for one in read_decisions(files) if one.turn != decision.turn]
    try:
        files.decisions.write(msgspec.json.encode([*earlier, decision][-MOST_DECISIONS:]))
    except StoreError as problem:
        log.warning("what was decided is not noted: %s", problem)


def read_decisions(files: DeployedFiles) -> list[Decision]:
    """The latest decisions, the oldest first; [] too where they are damaged: they are for people."""
    try:
        data = files.decisions.read()
        return [] if data is None else msgspec.json.decode(data, type=list[Decision])
    except (StoreError, msgspec.MsgspecError):
        return []
