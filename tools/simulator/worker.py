"""A worker process of the simulator: it plays one device after another, with the agent's own session."""

from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fleetune.coordinator.run.stored_run import stored_backbone
from fleetune.edge_agent.personal.serving import serving_of
from fleetune.edge_agent.run.session import Session
from fleetune.edge_agent.training.backend import Backend, Upper
from fleetune.edge_agent.training.device_data import DeviceData, for_vocabulary
from fleetune.edge_agent.training.feature_data import FeatureData, features_of, upper_of
from fleetune.edge_agent.training.local_training import LocalTrainer
from fleetune.edge_agent.training.trainers import make_backend
from fleetune.protocols.methods import from_section
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.skeletons.choice import Budget
from fleetune.protocols.skeletons.method import Method
from fleetune.protocols.update import codec
from fleetune.protocols.wire.payloads import Enrolment
from fleetune.tools.simulator import starting_models
from fleetune.tools.simulator.simulated_fleet import Shares

_MOST_FEATURE_BYTES = 2**28  # in each worker
WORKER_DIED = "a worker process died, perhaps for lack of memory: try fewer --workers"


@dataclass(frozen=True)
class Stage:
    """What a worker keeps between devices: the model once, the data once, personal states on disk."""

    settings: RunSettings
    enrolment: Enrolment
    method: Method[Any, Any, Any, Any]
    backend: Backend
    shares: Shares
    folder: Path
    upper: Upper | None = None
    features: OrderedDict[str, FeatureData] = field(default_factory=OrderedDict)

    def reply(self, name: str, index: int, ratio: float, payload: bytes) -> bytes:
        """Play device `name` through one assignment; its encoded reply."""
        data = for_vocabulary(self.shares.of(index, self.enrolment.spec), self.backend.vocabulary)
        backend = self.backend if self.upper is None else self.upper.backend
        trainer = LocalTrainer(backend, self._with_features(name, data), self.enrolment.training)
        adoption = serving_of(starting_models.served_files(self.folder, name), self.enrolment, trainer)
        session = Session(
            self.enrolment,
            name,
            self.method,
            trainer,
            starting_models.state(self.folder, name),
            adoption=adoption,
            own=partial(starting_models.own_model, self.folder, name),
            keep_replies=False,
        )
        return session.reply(payload, Budget(ratio))

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


def _num_bytes(data: FeatureData) -> int:
    return sum(array.nbytes for array in data.features.values())


_stage: Stage | None = None


def start(settings: RunSettings, enrolment: bytes, folder: Path) -> None:
    """Set this process up, once; `folder` is that of the devices' states, in the run's folder."""
    global _stage  # noqa: PLW0603 - a worker process has one stage, and the pool calls plain functions
    decoded = codec.decode(enrolment, Enrolment, None)
    method = from_section(decoded.method, decoded.spec)
    frozen = stored_backbone(folder.parent, decoded.spec)
    backend = make_backend("torch", decoded.spec, None, 1, task=decoded.learns, frozen=frozen)
    upper = upper_of(backend, decoded.training)
    _stage = Stage(settings, decoded, method, backend, Shares(settings), folder, upper)


def reply(name: str, index: int, ratio: float, payload: bytes) -> bytes:
    """`Stage.reply` of this process."""
    assert _stage is not None, "start() runs first in every worker"
    return _stage.reply(name, index, ratio, payload)
