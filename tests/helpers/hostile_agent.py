"""An `edge-agent` that forges its replies at the first attempt of some rounds.

The environment variable FORGED names the kinds, for round 3 and the following rounds, see
`hostile_fleet.FORGERS`.
"""

import os
from dataclasses import replace

from tests.helpers.hostile_fleet import LOST, forged

from fleetune.edge_agent.cli import app
from fleetune.edge_agent.extensions.session_state import HELD_MODEL
from fleetune.edge_agent.run.session import Session
from fleetune.edge_agent.run.task_reader import read_task_header

KINDS = os.environ["FORGED"].split(",")
FIRST_ROUND = 3

_reply = Session.reply
_lost = set()


def reply(self, data, *arguments, **named):
    turn = read_task_header(data, self.spec)
    place = turn.round - FIRST_ROUND
    kind = KINDS[place] if turn.attempt == 1 and 0 <= place < len(KINDS) else None
    if kind == LOST and turn.round not in _lost:
        _lost.add(turn.round)
        slots = {name: one for name, one in self._state.slots.items() if name != HELD_MODEL}
        self._take_over(replace(self._state, slots=slots))
    made = _reply(self, data, *arguments, **named)
    return made if kind in (None, LOST) else forged(made, kind, self._method, self.spec)


Session.reply = reply

if __name__ == "__main__":
    app()
