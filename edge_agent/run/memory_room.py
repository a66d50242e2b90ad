"""Checks that this board's memory has space for a run's payloads, before any payload is unpacked."""

from fleetune.edge_agent.probes.memory import process_memory
from fleetune.protocols.conditions import Conditions
from fleetune.protocols.errors import ModelError
from fleetune.protocols.update import codec

COPIES = 3  # copies of a payload while it is unpacked: packed, unpacked, and as arrays


def room(conditions: Conditions) -> int | None:
    """Return the bytes that this process may still allocate; None if unknown."""
    usable, held = conditions.memory_bytes, process_memory().resident
    return None if usable is None or held is None else max(0, usable - held)


def check_unpacks(data: bytes, what: str, conditions: Conditions) -> None:
    """Raise ModelError if the payload named `what` is too large for this board's memory."""
    check_holds(COPIES * codec.unpacked_bytes(data), conditions, f"{what} takes {{}} to unpack")


def check_holds(needed: int, conditions: Conditions, what: str = "frozen part takes {}") -> None:
    """Raise ModelError if this board's memory cannot hold this many more bytes."""
    usable, held = conditions.memory_bytes, process_memory().resident
    if usable is not None and held is not None and held + needed > usable:
        raise ModelError(
            f"the run's {what.format(f'{needed / 1e6:.0f} MB')}; this process holds {held / 1e6:.0f} MB"
            f" already and may take {usable / 1e6:.0f} MB"
        )
