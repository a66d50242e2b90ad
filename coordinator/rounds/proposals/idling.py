"""What it costs that boards draw power while a round lasts, whoever works in it: for `energy` and `money`.

A round at a pace takes of each board the joules of its work, and for the rest of the pace those of doing
nothing. So waiting for a device that works more thriftily may cost the others more than it saves. Each pace
is held against the others: at each of them a device does what brings most work for what its board takes of
the whole round, and the pace is the one of most work (the geometric mean of what devices do, as for `time`:
`proposals.pace`) for what all boards of the fleet take, those beside the round too.

What a device says that it draws doing nothing can be no more than what it says that it draws at work, and
counts up to `MOST_TIMES_USUAL` times the median of the fleet: one that lies shortens rounds for the others by
no more than so many honest ones would.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from fleetune.coordinator.rounds.engine_state import EngineState
from fleetune.coordinator.rounds.proposals.offers import KILOWATT_HOUR, Choices, Offer, taken
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.settings.objective import ObjectiveSection

MOST_TIMES_USUAL = 10.0
MOST_PACES = 64  # that are looked at: each is within a few percent of the next one


@dataclass(frozen=True)
class Idling:
    """What a second of doing nothing takes, in units of what is to be minimised.

    Attributes:
        of: of each device of the round that says so, and what its choices take.
        others: of all other boards of the fleet together.
    """

    of: Mapping[DeviceId, float]
    others: float


def idling_of(
    state: EngineState, choices: Mapping[DeviceId, Choices], objective: ObjectiveSection
) -> Idling | None:
    """Of a round with these choices; None: it costs nothing, or nobody says what it takes."""
    prices = {"energy": 1.0, "money": objective.price.kilowatt_hour / KILOWATT_HOUR}
    price = prices.get(objective.minimise, 0.0)
    said = {name: _said_w(state, name) for name in state.groups.eligible_ascending} if price else {}
    told = {name: idle_w for name, idle_w in said.items() if idle_w}
    knowing = [name for name, some in choices.items() if name in told and _know(some, objective)]
    if not knowing:
        return None
    most_w = MOST_TIMES_USUAL * median(told.values())
    own = {name: price * min(told[name], most_w, _least_w(choices[name])) for name in knowing}
    return Idling(own, sum(price * min(told[name], most_w) for name in told if name not in own))


def waiting_no_longer_than_pays(
    choices: Mapping[DeviceId, Choices], objective: ObjectiveSection, idling: Idling, fixed_s: float = 0.0
) -> dict[DeviceId, Choices]:
    """Of each device's choices those within the pace that take no more than what brings most there; all
    within it, of a device that does not say what they take.

    `fixed_s`: a round takes so long anyhow.
    """
    least_s = max(fixed_s, *(min(one.seconds for one in some) for some in choices.values()))
    table = _Table.of({name: choices[name] for name in idling.of}, objective, idling)
    pace_s, most = table.best(_paces(choices, least_s), idling.others)
    allowed = dict(zip(idling.of, most.tolist(), strict=True))

    def pays(name: DeviceId, one: Offer) -> bool:
        fits = one.seconds <= pace_s
        return fits and (name not in allowed or _above(one, objective, idling.of[name]) <= allowed[name])

    return {name: [one for one in some if pays(name, one)] for name, some in choices.items()}


@dataclass(frozen=True)
class _Table:
    """Devices in rows, their choices in columns; rows of fewer choices end with some that nobody can keep.

    Attributes:
        seconds, work, above: of a choice; `above` is what it takes beyond doing nothing as long.
        idle: a second of doing nothing, shape (devices, 1).
    """

    seconds: NDArray[np.float64]
    work: NDArray[np.float64]
    above: NDArray[np.float64]
    idle: NDArray[np.float64]

    @classmethod
    def of(cls, choices: Mapping[DeviceId, Choices], objective: ObjectiveSection, idling: Idling) -> "_Table":
        shape = len(choices), max((len(some) for some in choices.values()), default=0)
        seconds, work, above = np.full(shape, np.inf), np.zeros(shape), np.zeros(shape)
        for row, (name, some) in enumerate(choices.items()):
            seconds[row, : len(some)] = [one.seconds for one in some]
            work[row, : len(some)] = [one.work for one in some]
            above[row, : len(some)] = [_above(one, objective, idling.of[name]) for one in some]
        return cls(seconds, work, above, np.array([[idling.of[name]] for name in choices]).reshape(-1, 1))

    def best(self, paces_s: NDArray[np.float64], others: float) -> tuple[float, NDArray[np.float64]]:
        """The pace of most work for what all take, the shortest of equals; and of each device's choice there,
        the one of most work for what it takes itself, what that takes beyond doing nothing, shape (devices,).
        """
        found = [self._at(float(pace_s), others) for pace_s in paces_s]
        best = int(np.argmax([pays for pays, _ in found]))
        return float(paces_s[best]), found[best][1]

    def _at(self, pace_s: float, others: float) -> tuple[float, NDArray[np.float64]]:
        taken_by = self.above + self.idle * pace_s
        pays = np.divide(self.work, taken_by, out=np.zeros_like(self.work), where=taken_by > 0)
        chosen = np.argmax(np.where(self.seconds <= pace_s, pays, -1.0), axis=1, keepdims=True)
        work, take, above = (
            np.take_along_axis(part, chosen, axis=1)[:, 0] for part in (self.work, taken_by, self.above)
        )
        all_take = take.sum() + others * pace_s
        return float(np.log(work).mean() - np.log(all_take)) if all_take else -np.inf, above


def _paces(choices: Mapping[DeviceId, Choices], least_s: float) -> NDArray[np.float64]:
    """Those that can pay: a choice takes just so long, and everybody can keep them; ascending."""
    wanted = [max(least_s, one.seconds) for some in choices.values() for one in some]
    all_s: NDArray[np.float64] = np.unique(np.array(wanted, np.float64))
    if len(all_s) <= MOST_PACES or all_s[0] <= 0:
        return all_s[-MOST_PACES:]
    wanted_s = np.geomspace(all_s[0], all_s[-1], MOST_PACES)
    picked = np.unique(np.minimum(np.searchsorted(all_s, wanted_s), len(all_s) - 1))
    return np.asarray(all_s[picked], np.float64)


def _know(choices: Choices, objective: ObjectiveSection) -> bool:
    return all(taken(one, objective) is not None for one in choices)


def _above(one: Offer, objective: ObjectiveSection, idle: float) -> float:
    """What a choice takes beyond doing nothing as long."""
    return max(0.0, (taken(one, objective) or 0.0) - idle * one.seconds)


def _said_w(state: EngineState, device: DeviceId) -> float:
    report = state.members[device].report
    return 0.0 if report is None or report.idle_w is UNSET else report.idle_w


def _least_w(choices: Choices) -> float:
    """The least that a device says it draws at work."""
    drawn = [one.joules / one.seconds for one in choices if one.joules is not None and one.seconds > 0]
    return min(drawn, default=0.0)
