"""The stored state of a device in a run: the method's state, the last reply, and a slot for each feature."""

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
"""Slot: the residual of error feedback (compression error of earlier updates), shape (spec.size,)."""
HELD_MODEL = "held_model"
"""Slot: the weights to which tasks are differences, shape (spec.size,). Empty until a task changes them."""

D = TypeVar("D")
L = TypeVar("L")


@dataclass(frozen=True)
class SessionState(Generic[D, L]):
    """A session between two rounds, as it is stored.

    Attributes:
        run: id of the run.
        state: the method's state on this device.
        round, attempt: round and attempt of the last work; 0 before the first.
        reply: the encoded reply of the last work; b"" if replies are not kept.
        slots: states of extensions, `RESIDUAL` and `HELD_MODEL`, by name; a slot may be missing.
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
    """Return the type to which stored slots are decoded; every slot may be missing."""
    kinds = {one.name: one.state_type for one in ORDER} | {RESIDUAL: FlatArray, HELD_MODEL: FlatArray}
    return defstruct("Slots", [(name, kind | UnsetType, UNSET) for name, kind in kinds.items()])


def read_state(data: bytes, method: Method[Any, Any, Any, Any]) -> State:
    """Decode a stored state. Raises PacketError if it is damaged or of another model."""
    generic: Any = SessionState
    kind = generic[method.device_state_type, _stored_slots()]
    found: SessionState[Any, Any] = codec.decode(data, kind, method.spec, finite=False)
    if isinstance(found.slots, dict):  # the default, for a missing field
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
    """Return the stored state of a run, or the initial state if nothing is stored.

    Args:
        enrolment: enrolment of the run.
        method: made from the enrolment.
        memory: where the state is stored.
        extensions: extensions of the run.
        own: returns the device's own model to start with, or None for the common model. Called when the run
            starts.

    Raises:
        PacketError: the stored state is damaged.
        StoreError: the stored state cannot be read.
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
