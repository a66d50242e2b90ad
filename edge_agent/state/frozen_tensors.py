"""The frozen part of a run's model on a device: kept from run to run, and fetched if it is missing."""

from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.protocols.errors import FleetuneError
from fleetune.protocols.model.backbone_file import Tensors, backbone_file_bytes, read_backbone
from fleetune.protocols.model.spec import Backbone
from fleetune.protocols.wire.payloads import Enrolment


class BackboneLacking(FleetuneError):  # noqa: N818 - it reports what to ask for, not a fault
    """The backbone is missing or damaged; it must be fetched from the coordinator."""


def frozen_tensors(store: AgentStore, enrolment: Enrolment) -> Tensors:
    """Return a run's frozen tensors by name, memory-mapped from their file; empty if the model has none.

    Raises:
        BackboneLacking: the backbone has to be fetched; the store has recorded its digest.
        PacketError: the stored backbone belongs to another model.
        StoreError: the backbone cannot be read, or its digest cannot be noted.
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
