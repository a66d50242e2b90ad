"""Functions that an executor calls in a worker process of the simulator, after `set_up`."""

from pathlib import Path

from fleetune.coordinator.store.stored_backbone import stored_backbone
from fleetune.edge_agent.run.shared_session_cache import SharedSessionCache
from fleetune.edge_agent.stream.sample_stream import DataStatistics
from fleetune.edge_agent.training.cached_features import upper_layers_of
from fleetune.edge_agent.training.trainers import make_backend
from fleetune.protocols.bundle.bundle import read_bundle
from fleetune.protocols.methods import from_section
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.update import codec
from fleetune.protocols.wire.payloads import Enrolment
from fleetune.tools.simulator.caller_samples import NO_CALLER_SAMPLES, CallerSamples
from fleetune.tools.simulator.jobs import ArrivalJob, TrainingJob, TrainingResult
from fleetune.tools.simulator.partitioned_data import PartitionedData
from fleetune.tools.simulator.streams.stream_devices import ArrivalResult, StreamDevices, stream_devices
from fleetune.tools.simulator.workers import worker_processes
from fleetune.tools.simulator.workers.device_files import keep_before
from fleetune.tools.simulator.workers.device_trainer import DeviceTrainer

# memory that ONNX Runtime keeps between steps; small, because a worker serves many devices
STEP_BYTES = 2**24
_trainer: DeviceTrainer | None = None


def set_up(
    settings: RunSettings,
    enrolment: bytes,
    folder: Path,
    caller_samples: CallerSamples = NO_CALLER_SAMPLES,
    bundle: bytes | None = None,
) -> None:
    """Set this worker process up for a run; called once.

    Args:
        settings: settings of the run.
        enrolment: payload of the enrolment.
        folder: folder of the devices' files, in the run's folder.
        caller_samples: samples that the caller passed.
        bundle: bundle from which the model is trained; None if torch trains.
    """
    global _trainer  # noqa: PLW0603 - the executor calls plain functions
    decoded = codec.decode(enrolment, Enrolment, None)
    read = None if bundle is None else read_bundle(bundle)
    backend = make_backend(
        "torch" if read is None else "onnx",
        decoded.spec,
        read,
        1,
        task=decoded.learns,
        frozen=stored_backbone(folder.parent, decoded.spec),
        cache_bytes=STEP_BYTES,
        device=settings.fleet.trains_on(worker_processes.number()),
        precision=settings.fleet.precision,
    )
    data = PartitionedData.of_run(settings, caller_samples)
    _trainer = DeviceTrainer(
        decoded,
        from_section(decoded.method, decoded.spec),
        backend,
        data,
        folder,
        SharedSessionCache.of(decoded.spec),
        upper_layers_of(backend, decoded.training),
        stream_devices(settings, decoded, data, folder, backend),
    )


def train(job: TrainingJob) -> TrainingResult:
    """Do one device's work on one task, and return its result."""
    return _here().train(job)


def receive_first_samples(name: str, index: int, wall_s: float) -> DataStatistics:
    """Store a device's first samples in this worker, see `StreamDevices.begin`."""
    return _streams().begin(name, index, wall_s)


def receive_samples(job: ArrivalJob) -> ArrivalResult:
    """Deliver samples to a device in this worker, see `StreamDevices.deliver`."""
    if job.num_closed is not None:
        keep_before(_here().folder, job.name, job.num_closed)
    return _streams().deliver(job.name, job.index, job.delivery, job.wall_s)


def _here() -> DeviceTrainer:
    assert _trainer is not None, "set_up() runs first in every worker"
    return _trainer


def _streams() -> StreamDevices:
    streams = _here().streams
    assert streams is not None, "called for runs with [data.arrivals]"
    return streams
