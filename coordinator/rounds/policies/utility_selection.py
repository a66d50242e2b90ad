"""Client selection by utility: how much a device's data can still teach, how fast it is, how long it waited.

Oort (Lai et al. 2021, arXiv:2010.06081): a device's utility is |B| sqrt(mean of squared losses) for its
training samples B. Utility grows with the rounds since the device was last selected. A device whose time t
exceeds T has (T / t)^2 of that utility. Participants are drawn by their utility. Differences to the paper:

- A device reports the mean loss of its last epoch, used instead of the root mean square.
- T is the median duration of the candidates. Oort's T grows when the sum of losses falls.
- t is measured by the coordinator's clock, from the task to its reply. The device's own prediction counts
  only before its first reply. Losses and samples count up to twice the median, so exaggeration gains nothing.
- No device starves: when a device has waited too long (`longest_wait`), all places go to those that waited
  longest. So slow devices share one round instead of each slowing down a different round.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median

from fleetune.coordinator.rounds.engine_state import EngineState, Member
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.randomness import Key

_MOST = 2.0  # a device's loss and samples count up to this many medians
_SLOWNESS = 2.0  # Oort's alpha
_UNCERTAINTY = 0.1  # Oort's weight of staleness: log(round) over the last selected round, under the root
_LEAST = 1e-3  # lower bound of the utility, so that a device with nothing left to learn can still be drawn
# longest wait: this many times the rounds that it takes to select every device once
_TURNS = 3


def draw_by_utility(
    candidates: Sequence[DeviceId], state: EngineState, count: int, key: Key
) -> tuple[DeviceId, ...]:
    """Draw at most `count` of `candidates` by utility; if a device waited too long, take the longest waiting
    ones.
    """
    number = state.round_attempt.number
    members = {device: state.members[device] for device in candidates}
    chances = dict(zip(candidates, key.uniform(len(candidates)), strict=True))
    waited = {device: rounds_waited(member, number) for device, member in members.items()}
    if max(waited.values(), default=0) >= longest_wait(len(candidates), count):
        order = sorted(candidates, key=lambda one: (-waited[one], chances[one]))
    else:
        worth = utilities(members, number)
        order = sorted(candidates, key=lambda one: -math.log(chances[one] or 2.0**-54) / worth[one])
    return tuple(order[:count])


def longest_wait(candidates: int, count: int) -> int:
    """Return the number of rounds after which a connected device is selected whatever its utility."""
    return _TURNS * math.ceil(candidates / max(1, count))


def rounds_waited(member: Member, number: int) -> int:
    """Return the number of rounds since the device's last task, or since the run began."""
    return max(0, number - 1 - member.asked.number)


def utilities(members: Mapping[DeviceId, Member], number: int) -> dict[DeviceId, float]:
    """Return the utility of each device in round `number`, above 0."""
    lessons, seconds = learning_utilities(members, number), seconds_of(members)
    usual_s = _usual(seconds)
    return {name: lessons[name] * min(1.0, usual_s / seconds[name]) ** _SLOWNESS for name in members}


def learning_utilities(members: Mapping[DeviceId, Member], number: int) -> dict[DeviceId, float]:
    """Return each device's utility regardless of time. A device without a reply gets the highest one."""
    losses = {name: member.observed.loss for name, member in members.items()}
    lessons = {name: loss for name, loss in losses.items() if loss is not None}
    samples = {name: member.report.num_samples if member.report else 0 for name, member in members.items()}
    usual_lesson, usual_samples = _usual(lessons), _usual(samples)
    learns = {
        name: min(lessons[name] / usual_lesson, _MOST) * min(samples[name] / usual_samples, _MOST)
        + math.sqrt(_UNCERTAINTY * math.log(max(1, number)) / max(1, members[name].asked.number))
        for name in lessons
    }
    best = max(learns.values(), default=1.0)
    return {name: max(learns.get(name, best), _LEAST) for name in members}


def seconds_of(members: Mapping[DeviceId, Member]) -> dict[DeviceId, float]:
    """Return each device's round duration in seconds; the median where it is unknown."""
    known = {name: one for name, member in members.items() if (one := _seconds(member)) is not None}
    usual_s = _usual(known)
    return {name: known.get(name, usual_s) for name in members}


def _usual(amounts: Mapping[DeviceId, float]) -> float:
    return float(median(amounts.values())) if amounts and median(amounts.values()) > 0 else 1.0


def _seconds(member: Member) -> float | None:
    """Return the device's round duration: observed, or else as predicted; None if unknown."""
    said_s = member.report.round_s if member.report else None
    taken_s = said_s if member.observed.took_s is None else member.observed.took_s
    return taken_s if taken_s is not None and 0 < taken_s < math.inf else None
