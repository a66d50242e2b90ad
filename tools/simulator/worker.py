"""A worker process of the simulator: it plays one device after another, with the agent's own session."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fleetune.edge_agent.personal.served_model import Adoption
from fleetune.edge_agent.run.session import Session
from fleetune.edge_agent.training.backend import Backend
from fleetune.edge_agent.training.device_data import for_vocabulary
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

    def reply(self, name: str, index: int, ratio: float, payload: bytes) -> bytes:
        """Play device `name` through one assignment; its encoded reply."""
        data = for_vocabulary(self.shares.of(index, self.enrolment.spec), self.backend.vocabulary)
        trainer = LocalTrainer(self.backend, data, self.enrolment.training)
        adoption = Adoption(
            starting_models.served(self.folder, name),
            self.enrolment,
            trainer,
            num_validation=data.size("validation"),
            samples=data.fingerprint,
        )
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


_stage: Stage | None = None


def start(settings: RunSettings, enrolment: bytes, folder: Path) -> None:
    """Set this process up, once."""
    global _stage  # noqa: PLW0603 - a worker process has one stage, and the pool calls plain functions
    decoded = codec.decode(enrolment, Enrolment, None)
    method = from_section(decoded.method, decoded.spec)
    backend = make_backend("torch", decoded.spec, None, 1, task=decoded.learns)
    _stage = Stage(settings, decoded, method, backend, Shares(settings), folder)


def reply(name: str, index: int, ratio: float, payload: bytes) -> bytes:
    """`Stage.reply` of this process."""
    assert _stage is not None, "start() runs first in every worker"
    return _stage.reply(name, index, ratio, payload)
