"""What is frozen in a run's model, as a device has it: kept from run to run, asked for where it lacks."""

from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.protocols.errors import FleetuneError
from fleetune.protocols.model.backbone_file import Tensors, backbone_file_bytes, read_backbone
from fleetune.protocols.model.spec import Backbone
from fleetune.protocols.wire.payloads import Enrolment


class BackboneLacking(FleetuneError):  # noqa: N818 - it reports what to ask for, not a fault
    """It is not here, or damaged; the coordinator has it."""


def frozen_tensors(store: AgentStore, enrolment: Enrolment) -> Tensors:
    """The frozen tensors of a run's model by name, as pages of their file; empty: it has none.

    Raises:
        BackboneLacking: it is to be asked for; the store knows which one it is.
        PacketError: it is of another model.
        StoreError: it cannot be read, or which one it is cannot be written down.
    """
    backbone = enrolment.spec.backbone
    if not isinstance(backbone, Backbone):
        return {}
    store.want_backbone(enrolment.run, backbone.digest)
    data = store.backbone(backbone.digest)
    if data is None:
        raise BackboneLacking(
            f"the frozen part of run {enrolment.run}'s model is not here yet: it takes"
            f" {backbone_file_bytes(backbone) / 1e6:.1f} MB"
        )
    return read_backbone(data, backbone)
