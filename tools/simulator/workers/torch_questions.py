"""Functions that need torch and run in a worker, so that the process of the rounds never imports it."""

from collections.abc import Callable
from typing import Any, TypeVar

from fleetune.coordinator.run.enrolment import Beginning
from fleetune.coordinator.run.models import Model, find_model, is_at_hand
from fleetune.edge_agent.training.single_sample_batches import describe_single_batches, has_single_batches
from fleetune.edge_agent.training.trainers import installed
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.tools.simulator.device_specs import device_specs
from fleetune.tools.simulator.partitioned_data import PartitionedData
from fleetune.tools.simulator.workers.trainer_choice import (
    TrainerChoice,
    choose_trainer,
    norms_on_single_samples,
)
from fleetune.tools.simulator.workers.worker_processes import WorkerProcesses

_NAMED = 5  # maximum number of devices that a line names
_Answer = TypeVar("_Answer")


def _ask(function: Callable[..., _Answer], *arguments: Any, workers: int) -> _Answer:
    if not workers:
        return function(*arguments)
    with WorkerProcesses(1) as aside:
        answer: _Answer = aside.submit(function, *arguments).result()
    return answer


def run_model(settings: RunSettings, *, workers: int) -> Model:
    """The run's model; with `workers` = 0 this process computes it."""
    return _ask(find_model, settings, workers=0 if is_at_hand(settings) else workers)


def run_trainer(
    settings: RunSettings, beginning: Beginning, data: PartitionedData, *, workers: int
) -> TrainerChoice:
    """The trainer of a run, see `choose_trainer`."""
    fleet = settings.fleet
    plain = not fleet.cards and fleet.precision == "float32"
    if plain and fleet.trainer == "torch" and "torch" in installed():
        return TrainerChoice()
    enrolment = beginning.enrolment
    first = data.device_data(0, enrolment.spec)
    return _ask(choose_trainer, settings, enrolment, beginning.backbone, first, workers=workers)


def single_sample_notice(
    settings: RunSettings, beginning: Beginning, data: PartitionedData, trains: TrainerChoice, *, workers: int
) -> str:
    """A line about devices with batches of one sample, and about norm layers there; "" if there are none."""
    enrolment = beginning.enrolment
    spec, batch_size = enrolment.spec, settings.training.batch_size
    if settings.data.arrivals is not None:
        return ""
    counts = zip(device_specs(settings.fleet, settings.run.seed), data.counts(spec), strict=True)
    names = [device.name for device, own in counts if has_single_batches(spec, own.train, batch_size)]
    if not names:
        return ""
    norms = _ask(norms_on_single_samples, enrolment, beginning.backbone, trains, workers=workers)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    verb = "has" if len(names) == 1 else "have"
    return describe_single_batches(
        f"{', '.join(names[:_NAMED])}{more} {verb} 1 training sample", norms, batch_size
    )
