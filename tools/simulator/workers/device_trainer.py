"""Trains one simulated device after another, with the agent's own session."""

from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fleetune.edge_agent.extensions.extension import RunStart
from fleetune.edge_agent.extensions.order import extensions_of
from fleetune.edge_agent.run.session import Session
from fleetune.edge_agent.run.shared_session_cache import SharedSessionCache
from fleetune.edge_agent.training.backend import Backend, UpperLayers
from fleetune.edge_agent.training.cached_features import CachedFeatures, cache_features
from fleetune.edge_agent.training.device_data import DeviceData, for_vocabulary
from fleetune.edge_agent.training.local_training import LocalTrainer
from fleetune.protocols.errors import ReferenceModelUnknown, TrainingStopped
from fleetune.protocols.method.method import Method
from fleetune.protocols.wire.payloads import Enrolment
from fleetune.tools.simulator import starting_models
from fleetune.tools.simulator.jobs import TrainingJob, TrainingResult
from fleetune.tools.simulator.partitioned_data import PartitionedData
from fleetune.tools.simulator.streams.stream_devices import StreamDevices
from fleetune.tools.simulator.workers.device_files import keep_before

_MOST_FEATURE_BYTES = 2**28  # memory limit of features in each worker


@dataclass(frozen=True)
class DeviceTrainer:
    """Trains devices in a worker; all of them share one model and one data set, and their states are files.

    Attributes:
        enrolment: enrolment of the run.
        method: method of the run.
        backend: backend that trains.
        data: data of all devices.
        folder: folder of the devices' files.
        cache: cache of the latest tasks.
        upper: the part above a frozen backbone; None if the whole model trains.
        streams: devices whose data grow; None if the data do not grow.
        features: features of the latest devices, if a backbone is frozen.
    """

    enrolment: Enrolment
    method: Method[Any, Any, Any, Any]
    backend: Backend
    data: PartitionedData
    folder: Path
    cache: SharedSessionCache
    upper: UpperLayers | None = None
    streams: StreamDevices | None = None
    features: OrderedDict[str, CachedFeatures] = field(default_factory=OrderedDict)

    def train(self, job: TrainingJob) -> TrainingResult:
        """Do one device's work on one task, and return its result."""
        if job.num_closed is not None:
            keep_before(self.folder, job.name, job.num_closed)
        if self.streams is not None:
            return self._train_on_stream(job, self.streams)
        data = for_vocabulary(self.data.device_data(job.index, self.enrolment.spec), self.backend.vocabulary)
        session = self._session(job.name, self._with_features(job.name, data))
        self.cache.tasks.content = job.content
        reply = _reply(session, job)
        sent = session.done.sent if job.near else None
        return TrainingResult(
            reply, base=session.base, compression_error=session.done.compression_error, sent=sent
        )

    def _train_on_stream(self, job: TrainingJob, streams: StreamDevices) -> TrainingResult:
        """Train on the samples that are pinned for the round."""
        with streams.opened(job.name, job.wall_s) as growing:
            try:
                data = streams.as_trained(growing.of_round(job.key))
            except TrainingStopped as problem:
                return TrainingResult(None, growing.figures(), declined=str(problem))
            growing.note_round(LocalTrainer(self.backend, data, self.enrolment.training))
            session = self._session(
                job.name, data if self.upper is None else cache_features(self.upper, data)
            )
            reply = _reply(session, job)
            if reply is not None:
                growing.trained(job.key)
            figures, compression_error = growing.figures(), session.done.compression_error
            return TrainingResult(
                reply, figures, session.num_samples, base=session.base, compression_error=compression_error
            )

    def _session(self, name: str, data: DeviceData) -> Session:
        backend = self.backend if self.upper is None else self.upper.backend
        trainer = LocalTrainer(backend, data, self.enrolment.training)
        files = starting_models.deployed_files(self.folder, name)
        keeps_newest = self.streams is None  # with streams the deployed model is tested between rounds
        start = RunStart.of(self.enrolment, trainer, files, session_keeps_newest=keeps_newest, simulated=True)
        return Session(
            self.enrolment,
            name,
            self.method,
            trainer,
            starting_models.state_file(self.folder, name),
            extensions=extensions_of(start),
            own=partial(starting_models.starting_model, self.folder, name),
            keep_replies=False,
            shared=self.cache,
        )

    def _with_features(self, name: str, data: DeviceData) -> DeviceData:
        """Return the device's data as features of the frozen backbone, computed once if memory allows.

        An agent with enough memory caches its features, too.
        """
        if self.upper is None:
            return data
        if name not in self.features:
            self.features[name] = cache_features(self.upper, data)
        self.features.move_to_end(name)
        while len(self.features) > 1 and sum(map(_num_bytes, self.features.values())) > _MOST_FEATURE_BYTES:
            self.features.popitem(last=False)
        return self.features[name]


def _reply(session: Session, job: TrainingJob) -> bytes | None:
    """Return the encoded reply; None if the task is a difference to a model that the device does not have."""
    try:
        return session.reply(job.payload, job.budget, mask_time=job.mask_time)
    except ReferenceModelUnknown:
        return None


def _num_bytes(data: CachedFeatures) -> int:
    return sum(array.nbytes for array in data.features.values())
