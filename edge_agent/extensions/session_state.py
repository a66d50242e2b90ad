"""What a device keeps of a run between its rounds: the method's state on it, and its last reply."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from msgspec import UNSET, UnsetType

from fleetune.edge_agent.extensions.adoption.deployed_model import Memory, ModelRecord
from fleetune.edge_agent.extensions.local_only import LocalOnlyModel
from fleetune.edge_agent.extensions.releases import Releases
from fleetune.edge_agent.training.optimisers.optimiser_memory import States
from fleetune.protocols.method import steps
from fleetune.protocols.method.method import Method
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.update import codec
from fleetune.protocols.wire.payloads import Enrolment

D = TypeVar("D")


@dataclass(frozen=True)
class Kept(Generic[D]):
    """What a session remembers: the method's device state, its last reply (round 0: none yet), what is
    known of the run's best model, what the optimiser remembers, where the run has that kept, the model that
    the device trains alone, where the run asks for one, the shared model's versions that it was given, and
    what its updates have left out so far, shape (spec.size,), where their encoding leaves something out, and
    what tasks have brought over the first weights, same shape, where they are differences to that.
    """

    run: str
    state: D
    round: int = 0
    attempt: int = 0
    reply: bytes = b""
    best: ModelRecord | None = None
    optimiser: States | UnsetType = UNSET
    alone: LocalOnlyModel | UnsetType = UNSET
    releases: Releases | UnsetType = UNSET
    residual: FlatArray | UnsetType = UNSET
    held: FlatArray | UnsetType = UNSET


def recall(
    enrolment: Enrolment,
    method: Method[Any, Any, Any, Any],
    memory: Memory,
    own: Callable[[], FlatArray | None] = lambda: None,
) -> Kept[Any]:
    """What a device remembers of a run, or what it begins with: the common model, or its `own` if it has one.

    Raises:
        PacketError: it is damaged.
        StoreError: it cannot be read.
    """
    data = memory.read()
    if data is not None:
        kind = Kept[method.device_state_type]  # type: ignore[name-defined]
        kept: Kept[Any] = codec.decode(data, kind, method.spec, finite=False)
        if kept.run == enrolment.run:
            return kept
    state, personal = steps.init_device(method, enrolment.weights), own()
    began = state if personal is None else method.start_from(state, personal)
    alone = first_local_only(enrolment, personal)
    return Kept(enrolment.run, began, alone=UNSET if alone is None else alone)


def first_local_only(enrolment: Enrolment, own: FlatArray | None = None) -> LocalOnlyModel | None:
    """The model to be trained alone as a run begins; None: the run asks for none."""
    section = enrolment.adoption
    if section is UNSET or not section.enabled or not section.compare_alone:
        return None
    weights = enrolment.weights if own is None else own
    return LocalOnlyModel(weights, weights if section.alone_on_all else None)
