"""Daily scores of simulated devices: each deployed model is tested on samples that arrive later."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetune.coordinator.metrics.averages import mean
from fleetune.coordinator.metrics.summary import DaySummary
from fleetune.coordinator.rounds.records import Traffic
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.tasks.task import Task
from fleetune.tools.simulator.streams.stream_devices import ArrivalResult

Answers = list[tuple[NDArray[Any], NDArray[Any]]]
Written = tuple[str, tuple[int, ...], bytes]  # an array as its type, shape and values


@dataclass(frozen=True)
class DailyScoresState:
    """The state of `DailyScores` with the same attributes, as a checkpoint stores it."""

    ended: list[DaySummary]
    joules: float
    rounds: int
    today: list[tuple[DeviceId, list[tuple[Written, Written]]]]


@dataclass
class DailyScores:
    """The daily scores of one run.

    Attributes:
        task: task of the run; it defines the score.
        ended: days that are over.
        joules: energy of all rounds so far.
        rounds: number of closed rounds so far.
    """

    task: Task
    ended: list[DaySummary] = field(default_factory=list)
    joules: float = 0.0
    rounds: int = 0
    _today: dict[DeviceId, Answers] = field(default_factory=dict)

    @property
    def state(self) -> DailyScoresState:
        """The state for a checkpoint."""
        today = [
            (device, [(_written(judged), _written(labels)) for judged, labels in answers])
            for device, answers in self._today.items()
        ]
        return DailyScoresState(self.ended, self.joules, self.rounds, today)

    def restore(self, state: DailyScoresState) -> None:
        """Restore a stored state."""
        self.ended, self.joules, self.rounds = state.ended, state.joules, state.rounds
        self._today = {
            device: [(_read(judged), _read(labels)) for judged, labels in answers]
            for device, answers in state.today
        }

    def note_round(self, number: int) -> None:
        """Count a closed training round."""
        self.rounds = number

    def add_joules(self, joules: float) -> None:
        """Count the energy of a reply that has arrived."""
        self.joules += joules

    def note(self, device: DeviceId, came: ArrivalResult) -> None:
        """Store a device's predictions for samples of the present day."""
        if came.judged is not None and came.labels is not None:
            self._today.setdefault(device, []).append((came.judged, came.labels))

    def end(self, traffic: Iterable[Traffic], drifting: int) -> None:
        """Close the day and add its summary.

        Args:
            traffic: traffic of the devices since the start.
            drifting: number of devices that report drift now.
        """
        today, self._today = self._today, {}
        devices = {device: self._score(answers) for device, answers in sorted(today.items())}
        known = list(traffic)
        self.ended.append(
            DaySummary(
                day=1 + len(self.ended),
                score=mean(devices.values()),
                rounds=self.rounds,
                joules=self.joules,
                up=sum(one.up for one in known),
                down=sum(one.down for one in known),
                drifting=drifting,
                devices={device: score for device, score in devices.items() if score is not None},
            )
        )

    def _score(self, answers: Answers) -> float | None:
        judged = np.concatenate([one for one, _ in answers])
        labels = np.concatenate([one for _, one in answers])
        return self.task.figure(self.task.score.name, judged, labels, None)


def _written(array: NDArray[Any]) -> Written:
    return array.dtype.str, array.shape, array.tobytes()


def _read(written: Written) -> NDArray[Any]:
    kind, shape, data = written
    return np.frombuffer(data, kind).reshape(shape)
