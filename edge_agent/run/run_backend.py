"""Makes the backend that trains a run's model on this board, within its memory."""

from collections.abc import Callable

from fleetune.edge_agent.probes.memory import process_memory
from fleetune.edge_agent.run.device import Device
from fleetune.edge_agent.run.memory_room import check_holds, check_unpacks, room
from fleetune.edge_agent.state.frozen_tensors import frozen_tensors
from fleetune.edge_agent.training.backend import Backend
from fleetune.edge_agent.training.step_guard import StepGuard
from fleetune.edge_agent.training.trainers import Kind, check_room, make_backend
from fleetune.protocols.bundle.bundle import read_bundle
from fleetune.protocols.conditions import Conditions
from fleetune.protocols.model.backbone_file import held_bytes
from fleetune.protocols.wire.payloads import Enrolment

LONGEST_STEP_S = 60.0  # lower bound of the step limit; a step longer than the round is of no use


def backend_of(
    device: Device,
    enrolment: Enrolment,
    kind: Kind,
    conditions: Conditions,
    stop: Callable[[], str | None],
) -> Backend:
    """Return the backend of a run's model.

    Raises:
        BackboneLacking: the frozen part of the model has to be fetched first.
        ModelError: memory is too small for the model, or it cannot be built here.
        PacketError: the bundle is damaged.
        StoreError: the bundle cannot be read.
    """
    spec, store = enrolment.spec, device.store
    check_holds(held_bytes(spec, as_stored=kind == "onnx"), conditions)
    frozen = frozen_tensors(store, enrolment)
    check_room(kind, conditions.memory_bytes, process_memory().resident or 0)
    bundle = store.bundle(enrolment.run)
    if bundle is not None:
        check_unpacks(bundle, "bundle", conditions)
    return make_backend(
        kind,
        spec,
        None if bundle is None else read_bundle(bundle, spec),
        device.settings.threads,
        task=enrolment.learns,
        frozen=frozen,
        guard=StepGuard(stop, max(LONGEST_STEP_S, enrolment.deadline_s)),
        room=room(conditions),
        device=device.settings.train_on,
    )
