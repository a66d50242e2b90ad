"""A worker process of the simulator: it plays one device after another, with the agent's own session."""

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetune.coordinator.store.stored_backbone import stored_backbone
from fleetune.edge_agent.extensions.adoption.serving import serving_of
from fleetune.edge_agent.run.session import Session
from fleetune.edge_agent.run.shared_session_cache import SharedSessionCache
from fleetune.edge_agent.stream.sample_stream import Figures
from fleetune.edge_agent.training.backend import Backend, Upper
from fleetune.edge_agent.training.device_data import DeviceData, for_vocabulary
from fleetune.edge_agent.training.feature_data import FeatureData, features_of, upper_of
from fleetune.edge_agent.training.local_training import LocalTrainer
from fleetune.edge_agent.training.trainers import Kind, make_backend
from fleetune.protocols.bundle.bundle import read_bundle
from fleetune.protocols.errors import BaseUnknown, TrainingStopped
from fleetune.protocols.method.method import Method
from fleetune.protocols.methods import from_section
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.update import codec
from fleetune.protocols.wire.payloads import Enrolment
from fleetune.tools.simulator import starting_models
from fleetune.tools.simulator.caller_samples import NO_CALLER_SAMPLES, CallerSamples
from fleetune.tools.simulator.jobs import ArrivalJob, TrainingJob, TrainingResult
from fleetune.tools.simulator.simulated_fleet import PartitionedData
from fleetune.tools.simulator.streams.stream_devices import ArrivalResult, StreamDevices, stream_devices
from fleetune.tools.simulator.workers import worker_processes
from fleetune.tools.simulator.workers.device_files import keep_before
from fleetune.tools.simulator.workers.trainer_choice import STEP_BYTES

if TYPE_CHECKING:  # it brings torch
    from fleetune.tools.simulator.batched_training.batch_slots import BatchSlots

_MOST_FEATURE_BYTES = 2**28  # in each worker


@dataclass(frozen=True)
class WorkerState:
    """What a worker keeps between devices: the model once, the data once, personal states on disk."""

    settings: RunSettings
    enrolment: Enrolment
    method: Method[Any, Any, Any, Any]
    backend: Backend
    shares: PartitionedData
    folder: Path
    beside: SharedSessionCache
    upper: Upper | None = None
    features: OrderedDict[str, FeatureData] = field(default_factory=OrderedDict)
    growing: StreamDevices | None = None
    seated: "Seated | None" = None

    def train(self, job: TrainingJob) -> TrainingResult:
        """Play a device through one assignment."""
        if job.closed is not None:
            keep_before(self.folder, job.name, job.closed)
        if self.growing is not None:
            return self._reply_growing(job, self.growing)
        data = for_vocabulary(self.shares.of(job.index, self.enrolment.spec), self.backend.vocabulary)
        session = self._session(job.name, self._with_features(job.name, data))
        self.beside.tasks.told = job.told
        train = _replied(session, job)
        sent = session.sent if job.near else None
        return TrainingResult(train, base=session.base, left_out=session.left_out, sent=sent)

    def train_batch(self, jobs: list[TrainingJob]) -> list[TrainingResult | Exception]:
        """Play several devices at once, each through its assignment; what came of each."""
        assert self.seated is not None, "asked where `fleet.at_once` says so"
        return self.seated.slots.each(lambda seat, job: self.seated.stages[seat].train(job), jobs)

    def _reply_growing(self, job: TrainingJob, devices: StreamDevices) -> TrainingResult:
        """With the samples of the round."""
        with devices.opened(job.name, job.wall_s) as growing:
            try:
                data = devices.as_trained(growing.of_round(job.key))
            except TrainingStopped as problem:
                return TrainingResult(None, growing.figures(), declined=str(problem))
            growing.note_round(LocalTrainer(self.backend, data, self.enrolment.training))
            session = self._session(job.name, data if self.upper is None else features_of(self.upper, data))
            train = _replied(session, job)
            if train is not None:
                growing.trained(job.key)
            figures, left_out = growing.figures(), session.left_out
            return TrainingResult(train, figures, session.num_samples, base=session.base, left_out=left_out)

    def _session(self, name: str, data: DeviceData) -> Session:
        backend = self.backend if self.upper is None else self.upper.backend
        trainer = LocalTrainer(backend, data, self.enrolment.training)
        files = starting_models.served_files(self.folder, name)
        once = self.growing is None  # there what is served is judged between rounds
        adoption = serving_of(files, self.enrolment, trainer, session_keeps_newest=once)
        return Session(
            self.enrolment,
            name,
            self.method,
            trainer,
            starting_models.state(self.folder, name),
            adoption=adoption,
            own=partial(starting_models.own_model, self.folder, name),
            keep_replies=False,
            beside=self.beside,
        )

    def _with_features(self, name: str, data: DeviceData) -> DeviceData:
        """As a device keeps them that has room for them; here those of the latest devices."""
        if self.upper is None:
            return data
        if name not in self.features:
            self.features[name] = features_of(self.upper, data)
        self.features.move_to_end(name)
        while len(self.features) > 1 and sum(map(_num_bytes, self.features.values())) > _MOST_FEATURE_BYTES:
            self.features.popitem(last=False)
        return self.features[name]


@dataclass(frozen=True)
class Seated:
    """Those who train at once.

    Attributes:
        seats: where they do.
        stages: one for each.
    """

    slots: "BatchSlots"
    stages: list[WorkerState]


def _replied(session: Session, job: TrainingJob) -> bytes | None:
    """None: the task is a difference to what the device does not hold."""
    try:
        return session.reply(job.payload, job.budget, mask_time=job.mask_time)
    except BaseUnknown:
        return None


def _num_bytes(data: FeatureData) -> int:
    return sum(array.nbytes for array in data.features.values())


_stage: WorkerState | None = None


def set_up(
    settings: RunSettings,
    enrolment: bytes,
    folder: Path,
    caller_samples: CallerSamples = NO_CALLER_SAMPLES,
    bundle: bytes | None = None,
) -> None:
    """Set this process up, once.

    Args:
        settings: of the run.
        enrolment: its payload.
        folder: of the devices' states, in the run's folder.
        caller_samples: what the run has from its caller.
        bundle: that its model is trained from; None: torch trains.
    """
    global _stage  # noqa: PLW0603 - a worker process has one stage, and the pool calls plain functions
    decoded = codec.decode(enrolment, Enrolment, None)
    method = from_section(decoded.method, decoded.spec)
    frozen = stored_backbone(folder.parent, decoded.spec)
    read = None if bundle is None else read_bundle(bundle)
    kind: Kind = "torch" if read is None else "onnx"
    device = settings.fleet.trains_on(worker_processes.number())
    backend = make_backend(
        kind,
        decoded.spec,
        read,
        1,
        task=decoded.learns,
        frozen=frozen,
        kept_bytes=STEP_BYTES,
        device=device,
        precision=settings.fleet.precision,
    )
    shares = PartitionedData(settings, caller_samples)
    growing = stream_devices(settings, decoded, shares, folder, backend)
    _stage = WorkerState(
        settings,
        decoded,
        method,
        backend,
        shares,
        folder,
        SharedSessionCache.of(decoded.spec),
        upper_of(backend, decoded.training),
        growing=growing,
    )
    if settings.fleet.at_once > 1:
        _stage = _seated(_stage, settings.fleet.at_once)


def _seated(stage: WorkerState, most: int) -> WorkerState:
    """So that devices train at once."""
    from fleetune.edge_agent.training.torch_backend import TorchBackend
    from fleetune.tools.simulator.batched_training.batch_slots import BatchSlots

    assert isinstance(stage.backend, TorchBackend), "choose() sees to it"
    seats = BatchSlots(stage.backend, most)
    stages = [
        replace(stage, backend=seat, upper=None, beside=SharedSessionCache.of(stage.enrolment.spec))
        for seat in seats.backends
    ]
    return replace(stage, seated=Seated(seats, stages))


def train(job: TrainingJob) -> TrainingResult:
    """`WorkerState.train` of this process."""
    return _here().train(job)


def train_batch(jobs: list[TrainingJob]) -> list[TrainingResult | Exception]:
    """`WorkerState.train_batch` of this process."""
    return _here().train_batch(jobs)


def receive_first_samples(name: str, index: int, wall_s: float) -> Figures:
    """`StreamDevices.begin`."""
    return _growing().begin(name, index, wall_s)


def receive_samples(coming: ArrivalJob) -> ArrivalResult:
    """`StreamDevices.come`."""
    if coming.closed is not None:
        keep_before(_here().folder, coming.name, coming.closed)
    return _growing().come(coming.name, coming.index, coming.turn, coming.wall_s)


def _here() -> WorkerState:
    assert _stage is not None, "start() runs first in every worker"
    return _stage


def _growing() -> StreamDevices:
    growing = _here().growing
    assert growing is not None, "asked of runs with [data.arrivals]"
    return growing
