"""Seconds, bytes and joules of a run, computed alike for simulated and real runs."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median

from msgspec import Struct, structs

from fleetune.coordinator.rounds.records import DeviceRound, RoundRecord
from fleetune.firmware_profiles import Board
from fleetune.protocols.round_cost import RoundCost
from fleetune.tools.simulator.energy import joules_by_round

SMOOTHED = 3  # rounds; few devices have few test samples
FIRST = 3  # rounds that medians leave out, because devices learn their costs in them


class Parts(Struct, frozen=True):
    """Seconds of the slowest device of a round, by part, and the rest of the round."""

    download: float
    train: float
    upload: float
    rest: float


class Trajectory(Struct, frozen=True):
    """Score, time, bytes and joules over a run.

    Attributes:
        rounds: number of closed rounds.
        seconds: seconds until the last round closed.
        round_s: median length of a round.
        bytes_up, bytes_down: bytes of all counted replies, and of their tasks.
        late: replies of stragglers, which did not count.
        points: seconds since the first round opened, and the smoothed score of the fleet.
        joules: energy of all boards until each of these points, idling included; computed from the boards'
            watts and the seconds that devices report.
        parts: medians over rounds; None if there are too few rounds, or no device reported them.
    """

    rounds: int
    seconds: float
    round_s: float
    bytes_up: int
    bytes_down: int
    late: int
    points: list[tuple[float, float]]
    joules: list[float]
    parts: Parts | None = None

    def joules_to(self, target: float) -> float | None:
        """Value when the score was reached; None if it never was."""
        reached = zip(self.joules, self.points, strict=True)
        return next((joules for joules, (_, score) in reached if score >= target), None)

    def seconds_to(self, target: float) -> float | None:
        """Value when the score was reached; None if it never was."""
        return next((at_s for at_s, score in self.points if score >= target), None)


def trajectory_of(rounds: Sequence[RoundRecord], boards: Mapping[str, Board]) -> Trajectory:
    """Compute the trajectory of training rounds, ascending; `boards` has every device's board."""
    began_s = rounds[0].opened_s
    replies = [reply for one in rounds for reply in one.devices.values()]
    lengths = [one.closed_s - one.opened_s for one in rounds[FIRST:] or rounds]
    points = list(_smoothed([(at_s - began_s, score) for at_s, score in _scores(rounds)]))
    return Trajectory(
        rounds=len(rounds),
        seconds=rounds[-1].closed_s - began_s,
        round_s=median(lengths),
        bytes_up=sum(reply.bytes_up for reply in replies),
        bytes_down=sum(reply.bytes_down for reply in replies),
        late=sum(len(one.participants) - len(one.devices) for one in rounds),
        points=points,
        parts=_parts(rounds[FIRST:] or rounds),
        joules=_joules(rounds, boards)[len(rounds) - len(points) :],  # no score before the first reply
    )


def _joules(rounds: Sequence[RoundRecord], boards: Mapping[str, Board]) -> list[float]:
    """Joules from watts, whatever devices report, because sensors differ in precision."""
    began_s, idle_w = rounds[0].opened_s, {name: board.idle_w for name, board in boards.items()}
    reckoned = [
        structs.replace(
            one,
            opened_s=one.opened_s - began_s,
            closed_s=one.closed_s - began_s,
            devices={name: _by_watts(reply, boards[name]) for name, reply in one.devices.items()},
        )
        for one in rounds
    ]
    return list(joules_by_round(reckoned, idle_w))


def _by_watts(reply: DeviceRound, board: Board) -> DeviceRound:
    took: RoundCost = reply.actual
    joules = (
        board.receive_w * (took.download_s or 0.0)
        + board.train_w * (took.train_s or 0.0)
        + board.transmit_w * (took.upload_s or 0.0)
    )
    return structs.replace(reply, actual=structs.replace(took, joules=joules))


def _scores(rounds: Sequence[RoundRecord]) -> Iterable[tuple[float, float]]:
    """Yield when each round closed, and the mean of the devices' latest scores."""
    latest: dict[str, float] = {}
    for one in rounds:
        known = {device: reply.measures.after for device, reply in one.devices.items()}
        latest |= {device: score for device, score in known.items() if score is not None}
        if latest:
            yield one.closed_s, fmean(latest.values())


def _smoothed(scores: Sequence[tuple[float, float]]) -> Iterable[tuple[float, float]]:
    for last, (at_s, _) in enumerate(scores, 1):
        yield at_s, fmean(score for _, score in scores[max(0, last - SMOOTHED) : last])


def _parts(rounds: Sequence[RoundRecord]) -> Parts | None:
    known = [parts for one in rounds if (parts := _of_longest(one))]
    if not known:
        return None
    return Parts(*(median(getattr(one, key) for one in known) for key in Parts.__struct_fields__))


def _of_longest(record: RoundRecord) -> Parts | None:
    known = [seconds for reply in record.devices.values() if (seconds := _seconds(reply))]
    if not known:
        return None
    longest = max(known, key=sum)
    return Parts(*longest, rest=record.closed_s - record.opened_s - sum(longest))


def _seconds(reply: DeviceRound) -> tuple[float, float, float] | None:
    actual = reply.actual
    if actual.download_s is None or actual.train_s is None or actual.upload_s is None:
        return None
    return actual.download_s, actual.train_s, actual.upload_s
