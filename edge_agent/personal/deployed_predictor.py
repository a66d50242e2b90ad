"""Predictions of the deployed model from Python. The model is reloaded when another one is deployed."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fleetune.edge_agent.extensions.adoption.deployed_model import ModelRecord, threshold_in
from fleetune.edge_agent.personal.inference_graph import Predictor, write_inference
from fleetune.edge_agent.personal.personal_model import PersonalModel, personal_model
from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.protocols.errors import FleetuneError
from fleetune.protocols.files import FileMark

AGAIN_S = 60.0


@dataclass(frozen=True)
class DeployedPredictor:
    """A deployed model that is ready for predictions.

    Attributes:
        predictor: runs the model.
        record: origin and known metrics of the model.
    """

    predictor: Predictor
    record: ModelRecord


def predictor_of(found: PersonalModel) -> Predictor:
    """Return a predictor of a personal model. Raises ModelError if ONNX Runtime is not installed."""
    threshold = threshold_in(found.record)
    return Predictor.of(write_inference(found.bundle, found.weights, {}, found.frozen, threshold))


class Follower:
    """Provides the deployed model, and loads it again when another model is deployed.

    Args:
        store: store of the device, whether its agent runs or not.
        trusted: the owner's own modules whose code a run may name.
        note: called with one line if the deployed model cannot be loaded.
        bundle: file of the model's bundle; None for the one received from the coordinator.
        clock: monotonic clock, in seconds.
    """

    def __init__(
        self,
        store: AgentStore,
        trusted: tuple[str, ...],
        note: Callable[[str], None],
        *,
        bundle: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._trusted, self._bundle = store, trusted, bundle
        self._note, self._clock = note, clock
        self._lock = threading.Lock()
        self._seen: FileMark | None = None
        self._deployed: DeployedPredictor | None = None
        self._again_at = 0.0

    def deployed(self) -> DeployedPredictor | None:
        """Return the deployed model; None if there is none or it cannot be loaded.

        Any thread may call this. The first call after a change loads the new model, which takes some
        milliseconds; the other threads wait.
        """
        identity = self._store.deployed.identity
        if self._is_up_to_date(identity):
            return self._deployed
        with self._lock:
            identity = self._store.deployed.identity
            if not self._is_up_to_date(identity):
                self._deployed, self._again_at = self._opened(identity), self._clock() + AGAIN_S
                self._seen = identity
            return self._deployed

    def _is_up_to_date(self, identity: FileMark | None) -> bool:
        known = self._deployed is not None or identity is None or self._clock() < self._again_at
        return identity == self._seen and known

    def _opened(self, identity: FileMark | None) -> DeployedPredictor | None:
        if identity is None:
            return None
        try:
            found = personal_model(self._store, None, self._bundle, trusted=self._trusted)
            return DeployedPredictor(predictor_of(found), found.record)
        except FleetuneError as problem:
            self._note(f"the deployed model cannot be used for predictions: {problem}")
            return None
