"""Client selection by speed tier: devices that take about the same time share a round.

A round lasts as long as its slowest participant. If each participant is drawn independently, nearly every
round has a slow device, and quick devices wait for it. TiFL (Chai et al. 2020, arXiv:2001.09249) groups
devices into tiers by latency, and each round takes participants of one tier. Fixed groups separate devices
that differ little. So this module uses weights instead:

1. The first participant is drawn by utility per second (see `utility_selection`). It takes T seconds.
2. The others are drawn among devices that take hardly longer than T. The weight of a device that takes t
   seconds is its learning utility times the rounds it waited, times min((t / T)^2, (T / t)^2). So devices
   close to T are preferred and little time is wasted.

Slow devices then share few rounds, quick ones many. Devices that have waited too long
(`utility_selection.longest_wait`) go first, the longest wait first. What devices may claim is bounded as in
`utility_selection`: the coordinator's clock measures the time, and a device that reports a high speed counts
as a median one until its first reply.
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

_ALIKE = 1.1  # other participants may take at most this many times the first one's seconds
_NEARNESS = 2.0
_LEAST_NEAR = 1e-3  # lower bound of the weight, so that every device can be drawn


def draw_by_speed_tier(
    candidates: Sequence[DeviceId], state: EngineState, count: int, key: Key
) -> tuple[DeviceId, ...]:
    """Draw at most `count` of `candidates` (at least one) that take about the same time."""
    number = state.round_attempt.number
    members = {device: state.members[device] for device in candidates}
    seconds, lessons = _seconds(members), learning_utilities(members, number)
    waited = {device: rounds_waited(member, number) for device, member in members.items()}
    chances = dict(zip(candidates, key.uniform(len(candidates)), strict=True))
    rolls = {device: -math.log(one or 2.0**-54) for device, one in chances.items()}
    most = longest_wait(len(candidates), count)
    overdue = sorted(
        (one for one in candidates if waited[one] >= most),
        key=lambda one: (-waited[one], -seconds[one], rolls[one]),
    )
    first = (
        overdue[0] if overdue else min(candidates, key=lambda one: rolls[one] * seconds[one] / lessons[one])
    )

    def roll(device: DeviceId) -> float:
        """Return a random sort key: the devices with the smallest keys are drawn, by their weights."""
        near = _near(seconds[device], seconds[first])
        return rolls[device] / (lessons[device] * (1 + waited[device]) * near)

    others = [one for one in candidates if one not in {first, *overdue}]
    others.sort(key=lambda one: (seconds[one] > _ALIKE * seconds[first], roll(one)))
    return tuple(dict.fromkeys([first, *overdue, *others]))[:count]


def _seconds(members: Mapping[DeviceId, Member]) -> dict[DeviceId, float]:
    """Return each device's round duration: observed, else as predicted but at least the median."""
    durations_s = seconds_of(members)
    usual_s = median(durations_s.values())
    return {
        name: max(durations_s[name], usual_s) if member.observed.took_s is None else durations_s[name]
        for name, member in members.items()
    }


def _near(one_s: float, first_s: float) -> float:
    shorter, longer = sorted((one_s, first_s))
    return float(max(shorter / longer, _LEAST_NEAR) ** _NEARNESS)
