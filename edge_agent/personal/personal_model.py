"""The model that a device deploys, or the result of one run, with the bundle needed to run it."""

from dataclasses import dataclass, field
from pathlib import Path

from fleetune.edge_agent.extensions.adoption.deployed_model import (
    DeployedModel,
    ModelRecord,
    other_score,
    read_deployed,
)
from fleetune.edge_agent.extensions.session_state import recall
from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.edge_agent.state.frozen_tensors import BackboneLacking, frozen_tensors
from fleetune.edge_agent.training.trusted_code import check_trust
from fleetune.protocols.bundle.bundle import Bundle, read_bundle
from fleetune.protocols.errors import PacketError, StoreError
from fleetune.protocols.methods import from_section
from fleetune.protocols.model.backbone_file import Tensors
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.wire.payloads import Enrolment, read_enrolment


@dataclass(frozen=True)
class PersonalModel:
    """A device's own model.

    Attributes:
        record: origin and known metrics; round 0 means the run's common model before any training.
        weights: shape (bundle.spec.size,).
        bundle: bundle of the model.
        frozen: tensors of its backbone; empty if it has none.
    """

    record: ModelRecord
    weights: FlatArray
    bundle: Bundle
    frozen: Tensors = field(default_factory=dict)


def personal_model(
    store: AgentStore, run: str | None = None, bundle: Path | None = None, *, trusted: tuple[str, ...] = ()
) -> PersonalModel:
    """Load a device's own model.

    Args:
        store: store of the device.
        run: run whose personal model to load; None for the deployed model, from any run.
        bundle: file of the model's bundle; None for the one received from the coordinator.
        trusted: the owner's own modules whose code the run may name.

    Raises:
        StoreError: the device does not know the run, its stored state is damaged, or the bundle is missing.
        SettingError: the run's method is unknown here, or is code that the owner does not trust.
    """
    try:
        deployed = None if run else read_deployed(store.deployed.read())
    except PacketError as problem:
        raise StoreError(
            f"{store.deployed.path}, the model that this device deploys, is damaged ({problem}); --run takes"
            " that of a run"
        ) from None
    named = deployed.record.run if deployed else run or _latest(store)
    data = None if named is None else store.enrolment(named).read()
    if named is None or data is None:
        raise StoreError(
            f"{store.folder}: this device has joined no run {named or 'yet'}; see edge-agent run"
        )
    try:
        enrolment = read_enrolment(data)
        found = deployed or _of_run(store, enrolment, trusted)
        frozen = _frozen(store, enrolment)
        read = read_bundle(_bundle(store, named, bundle)).for_devices(enrolment.spec)
        read.check_is_of(enrolment.spec)
    except PacketError as problem:
        raise StoreError(f"{store.folder}, run {named}: {problem}") from None
    return PersonalModel(found.record, found.weights, read, frozen)


def _frozen(store: AgentStore, enrolment: Enrolment) -> Tensors:
    try:
        return frozen_tensors(store, enrolment)
    except BackboneLacking as problem:
        raise StoreError(f"{store.folder}: {problem}; join a run with it again") from None


def _latest(store: AgentStore) -> str | None:
    """Return the run to show while no model is deployed: the latest with finished work, else the latest."""
    runs = store.runs()
    done = (run for run in runs if store.session(run).read() is not None)
    return next(done, next(iter(runs), None))


def _of_run(store: AgentStore, enrolment: Enrolment, trusted: tuple[str, ...]) -> DeployedModel:
    """Return the personal model in the run's stored state."""
    check_trust(enrolment, trusted, builds_model=False)
    method, spec = from_section(enrolment.method, enrolment.spec), enrolment.spec
    stored = recall(enrolment, method, store.session(enrolment.run))
    record = ModelRecord(
        run=enrolment.run,
        round=stored.round,
        final_evaluation=False,
        model=spec.hash,
        input_shape=spec.input_shape,
        num_classes=spec.num_classes,
        score=other_score(enrolment.learns),
        trained=stored.round > 0,
    )
    return DeployedModel(record, method.personal_model(stored.state))


def _bundle(store: AgentStore, run: str, path: Path | None) -> bytes:
    if path is not None:
        try:
            return path.read_bytes()
        except OSError as problem:
            raise StoreError(f"cannot read bundle {path}: {problem.strerror}") from None
    found = store.bundle(run)
    if found is None:
        raise StoreError(
            f"{store.folder}: no bundle of run {run} is here, its model is trained by torch; give --bundle"
            " FILE that edge-coordinator export wrote"
        )
    return found
