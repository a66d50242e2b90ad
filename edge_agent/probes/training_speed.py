"""Measures training speed and memory on this board, with a few real steps of the training loop."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from fleetune.edge_agent.probes.memory import PeakMemory
from fleetune.edge_agent.training.backend import Backend
from fleetune.edge_agent.training.device_data import DeviceData
from fleetune.edge_agent.training.local_training import LocalTrainer, batch_slices
from fleetune.protocols.errors import TrainingStopped
from fleetune.protocols.method.trainer import FitPlan
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.device import TrainingSection
from fleetune.protocols.update.selection import Neurons

_KEY = Key.of("fleetune", "calibration")
_WARM_UP_STEPS = 1
_LEAST_STEPS = 2
_ENDLESS = 2**31
_STILL = 1e-12  # so small a learning rate never diverges, and a step takes as long


@dataclass(frozen=True)
class TrainingSpeed:
    """Training speed at one ratio.

    Attributes:
        ratio: share of the neurons that were trained.
        samples_per_s: samples a second by the clock, with optimiser and loading of batches.
        peak_bytes: peak memory of the whole process meanwhile; None if unknown.
    """

    ratio: float
    samples_per_s: float
    peak_bytes: int | None


def measure_training(
    backend: Backend,
    data: DeviceData,
    settings: TrainingSection,
    weights: FlatArray,
    ratios: Iterable[float] = (1.0,),
    *,
    memory: PeakMemory | None = None,
    seconds: float = 1.0,
    stop: Callable[[], str | None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[TrainingSpeed, ...]:
    """Train for a while at each ratio and measure it. The trained weights are discarded.

    Args:
        backend: the fleet's model. Its vectors are overwritten.
        data: samples in the model's shape, at least one for training.
        settings: the run's batch size, momentum and so on.
        weights: initial weights, shape (spec.size,).
        ratios: shares of neurons that are trained, each in (0, 1]. The others are frozen, as in a round.
        memory: measures the peak.
        seconds: duration for each ratio, after a first step that does not count. At least two steps count.
        stop: called before every step; a reason ends the measurement.
        clock: monotonic seconds.

    Raises:
        TrainingStopped: `stop` returned a reason.
        ModelError: the model cannot train on such batches, or its loss is not finite at `weights`.
    """
    still = replace(settings, learning_rate=_STILL)
    memory = memory or PeakMemory()
    speeds = []
    for ratio in ratios:
        watch = _Watch(_batch_sizes(data, settings), seconds, clock)
        mask = Neurons(ratio, _KEY.value).mask(backend.spec) if ratio < 1 else None
        memory.reset()
        _train(backend, data, still, weights, FitPlan(trainable=mask, epochs=_ENDLESS), watch, stop)
        speeds.append(TrainingSpeed(ratio, watch.samples_per_s, memory.read()))
    return tuple(speeds)


def _train(
    backend: Backend,
    data: DeviceData,
    settings: TrainingSection,
    weights: FlatArray,
    plan: FitPlan,
    watch: "_Watch",
    stop: Callable[[], str | None],
) -> None:
    """Train until the watch has counted enough samples, or `stop` returns a reason."""

    def over() -> str | None:
        return "measured" if watch.enough else stop()

    trainer = LocalTrainer(backend, data, settings, over, watch.tick)
    try:
        trainer.fit(weights, plan, _KEY)
    except TrainingStopped:
        if not watch.enough:
            raise


def _batch_sizes(data: DeviceData, settings: TrainingSection) -> list[int]:
    slices = batch_slices(data.size("train"), settings.batch_size)
    return [batch.stop - batch.start for batch in slices]


@dataclass
class _Watch:
    """Counts samples from step to step.

    Attributes:
        batches: sizes of an epoch's batches.
        seconds: how long to count.
        clock: monotonic seconds.
    """

    batches: list[int]
    seconds: float
    clock: Callable[[], float]
    _steps: int = 0
    _samples: int = 0
    _began: float = 0.0
    _now: float = 0.0

    @property
    def enough(self) -> bool:
        counted = self._steps - _WARM_UP_STEPS
        return counted >= _LEAST_STEPS and self._now - self._began >= self.seconds

    @property
    def samples_per_s(self) -> float:
        return self._samples / max(self._now - self._began, 1e-9)

    def tick(self, _: float) -> None:
        """Count a finished step."""
        self._now = self.clock()
        if self._steps < _WARM_UP_STEPS:
            self._began = self._now
        else:
            self._samples += self.batches[self._steps % len(self.batches)]
        self._steps += 1
