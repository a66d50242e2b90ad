"""Stores the frozen tensors of a run's model as a file in the run's folder."""

from pathlib import Path

from fleetune.coordinator.store.run_folder import BACKBONE
from fleetune.protocols.errors import PacketError, StoreError
from fleetune.protocols.model.backbone_file import Tensors, mapped, read_backbone
from fleetune.protocols.model.spec import Backbone, ModelSpec
from fleetune.protocols.wire.transfer import digest_of


def backbone_payload(folder: Path, spec: ModelSpec) -> memoryview:
    """Return the file of the frozen tensors of a run's model, as it is sent.

    Raises:
        StoreError: it is missing or damaged.
    """
    assert isinstance(spec.backbone, Backbone)
    found = mapped(folder / BACKBONE)
    if found is None or digest_of(found) != spec.backbone.digest:
        state = "missing" if found is None else "damaged"
        raise StoreError(f"{folder / BACKBONE}, what is frozen in the run's model, is {state}: restore it")
    return found


def stored_backbone(folder: Path, spec: ModelSpec) -> Tensors:
    """Return the frozen tensors by name.

    Empty if none are frozen. Raises StoreError if the file is damaged.
    """
    if not isinstance(spec.backbone, Backbone):
        return {}
    try:
        return read_backbone(backbone_payload(folder, spec), spec.backbone)
    except PacketError as problem:
        raise StoreError(f"{folder / BACKBONE}: {problem}") from None
