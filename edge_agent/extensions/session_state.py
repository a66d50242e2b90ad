"""What a device keeps of a run between rounds: the method's state, the last reply, and a slot a feature."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Generic, TypeVar

from msgspec import UNSET, UnsetType, defstruct, structs

from fleetune.edge_agent.extensions.extension import ExtensionChain, Slots
from fleetune.edge_agent.extensions.order import ORDER
from fleetune.edge_agent.state.agent_store import Memory
from fleetune.protocols.method import steps
from fleetune.protocols.method.method import Method
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.update import codec
from fleetune.protocols.wire.payloads import Enrolment

RESIDUAL = "residual"
"""Slot: what the encodings of earlier updates left out, shape (spec.size,); see error feedback."""
HELD_MODEL = "held_model"
"""Slot: the weights that tasks are differences to, shape (spec.size,), once a task changed the first ones."""

D = TypeVar("D")
L = TypeVar("L")


@dataclass(frozen=True)
class SessionState(Generic[D, L]):
    """A session between two rounds, as it is stored.

    Attributes:
        run: id of the run.
        state: the method's state on this device.
        round, attempt: of the last work; 0: none yet.
        reply: the encoded reply to it; b"": replies are not kept.
        slots: the states of extensions, `RESIDUAL` and `HELD_MODEL`, by name. One that is missing is not
        there.
    """

    run: str
    state: D
    round: int = 0
    attempt: int = 0
    reply: bytes = b""
    slots: L = field(default_factory=dict)  # type: ignore[assignment]


State = SessionState[Any, Slots]


@cache
def _stored_slots() -> type:
    """The type that stored slots are read as: every slot may be missing."""
    kinds = {one.name: one.state_type for one in ORDER} | {RESIDUAL: FlatArray, HELD_MODEL: FlatArray}
    return defstruct("Slots", [(name, kind | UnsetType, UNSET) for name, kind in kinds.items()])


def read_state(data: bytes, method: Method[Any, Any, Any, Any]) -> State:
    """A stored state. Raises PacketError: it is damaged, or of another model."""
    generic: Any = SessionState
    kind = generic[method.device_state_type, _stored_slots()]
    found: SessionState[Any, Any] = codec.decode(data, kind, method.spec, finite=False)
    if isinstance(found.slots, dict):  # the default: the field is missing
        return found
    slots = {name: one for name, one in structs.asdict(found.slots).items() if one is not UNSET}
    return replace(found, slots=slots)


def recall(
    enrolment: Enrolment,
    method: Method[Any, Any, Any, Any],
    memory: Memory,
    extensions: ExtensionChain = ExtensionChain(),  # noqa: B008 - frozen
    own: Callable[[], FlatArray | None] = lambda: None,
) -> State:
    """What a device remembers of a run; else the state to start with.

    Args:
        enrolment: of the run.
        method: made from it.
        memory: where the state is stored.
        extensions: of the run.
        own: the device's own model to start with, called when the run starts; None: the common model.

    Raises:
        PacketError: what is stored is damaged.
        StoreError: it cannot be read.
    """
    data = memory.read()
    if data is not None:
        found = read_state(data, method)
        if found.run == enrolment.run:
            return found
    state, personal = steps.init_device(method, enrolment.weights), own()
    if personal is not None:
        state = method.start_from(state, personal)
    first = enrolment.weights if personal is None else personal
    return SessionState(enrolment.run, state, slots=extensions.first_slots(first))
