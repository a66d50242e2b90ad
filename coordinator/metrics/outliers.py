"""Devices whose latest updates are mostly outlying, for the status of a run."""

from collections import deque

from fleetune.coordinator.rounds.engine_state import EngineState
from fleetune.coordinator.rounds.records import RoundRecord, StepFigures
from fleetune.protocols.method.method import DeviceId

LATEST, LEAST = 10, 3  # rounds of a device that count, and how many of them must be outlying


class LatestOutliers:
    """Collects the latest steps of each device."""

    def __init__(self) -> None:
        self._steps: dict[DeviceId, deque[StepFigures]] = {}

    def add(self, record: RoundRecord) -> None:
        """Add a closed round."""
        for device, reply in record.devices.items():
            if reply.step is not None and not record.final_evaluation:
                self._steps.setdefault(device, deque(maxlen=LATEST)).append(reply.step)

    def lines(self, state: EngineState) -> tuple[str, ...]:
        """Return one line for each device with at least `LEAST` outlying rounds, and at least half of the
        latest.
        """
        return tuple(
            f"{state.identity(device)} sends unusual updates: {_words(steps)}"
            for device, steps in sorted(self._steps.items())
            if (count := sum(one.is_outlying for one in steps)) >= LEAST and 2 * count >= len(steps)
        )


def _words(steps: deque[StepFigures]) -> str:
    count, newest = sum(one.is_outlying for one in steps), steps[-1]
    size = "" if newest.ratio is None else f"; the last step has {newest.ratio:.3g} times the median size"
    cosine = "" if newest.cosine is None else f", cosine {newest.cosine:.2f}"
    return f"{count} of its last {len(steps)} rounds{size}{cosine}"
