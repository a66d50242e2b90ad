"""Who shares a round: devices that take alike long.

A round lasts as long as its slowest participant. Where each place is drawn by itself, nearly every round has
a slow one, and who is quick waits for it. TiFL (Chai et al. 2020, arXiv:2001.09249) groups devices into tiers
by their latency, and each round has participants of one tier. Here there are no groups, which have edges: the
first participant is drawn by what it teaches a second, and the others among those that take hardly longer
than it, by what they teach (see `usefulness`), times the rounds that they waited, times (t / T)^2 or, where
that is less, (T / t)^2, of T seconds that the first takes: the nearer they come to its time, the less of it
is wasted. Slow devices then share few rounds, quick ones many.

Once somebody has waited for `max_wait` rounds, those that have go first, the longest wait before all. What
devices may claim is bounded as in `usefulness`: time is the coordinator's own clock, and who says that it is
quick counts as a usual one until its first reply.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median

from fleetune.coordinator.rounds.engine_state import EngineState, Member
from fleetune.coordinator.rounds.policies.utility_selection import (
    learning_utilities,
    longest_wait,
    rounds_waited,
    seconds_of,
)
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.coordinator import RoundSection

_ALIKE = 1.1  # times as long as the first one others may take
_NEARNESS = 2.0
_LEAST_NEAR = 1e-3  # however far apart two are, so that everybody can be drawn


def draw_by_speed_tier(
    candidates: Sequence[DeviceId], state: EngineState, settings: RoundSection, count: int, key: Key
) -> tuple[DeviceId, ...]:
    """At most `count` of `candidates`, of which there is one at least, that take alike long."""
    number = state.round_attempt.number
    members = {device: state.members[device] for device in candidates}
    seconds, lessons = _seconds(members), learning_utilities(members, number)
    waited = {device: rounds_waited(member, number) for device, member in members.items()}
    chances = dict(zip(candidates, key.uniform(len(candidates)), strict=True))
    rolls = {device: -math.log(one or 2.0**-54) for device, one in chances.items()}
    most = longest_wait(len(candidates), count, settings)
    overdue = sorted(
        (one for one in candidates if waited[one] >= most),
        key=lambda one: (-waited[one], -seconds[one], rolls[one]),
    )
    first = (
        overdue[0] if overdue else min(candidates, key=lambda one: rolls[one] * seconds[one] / lessons[one])
    )

    def roll(device: DeviceId) -> float:
        """The least are drawn, each as often as its weight says."""
        near = _near(seconds[device], seconds[first])
        return rolls[device] / (lessons[device] * (1 + waited[device]) * near)

    others = [one for one in candidates if one not in {first, *overdue}]
    others.sort(key=lambda one: (seconds[one] > _ALIKE * seconds[first], roll(one)))
    return tuple(dict.fromkeys([first, *overdue, *others]))[:count]


def _seconds(members: Mapping[DeviceId, Member]) -> dict[DeviceId, float]:
    """What a round takes each, as it was seen; as it says before that, the usual one's at least."""
    told = seconds_of(members)
    usual_s = median(told.values())
    return {
        name: max(told[name], usual_s) if member.observed.took_s is None else told[name]
        for name, member in members.items()
    }


def _near(one_s: float, first_s: float) -> float:
    shorter, longer = sorted((one_s, first_s))
    return float(max(shorter / longer, _LEAST_NEAR) ** _NEARNESS)
