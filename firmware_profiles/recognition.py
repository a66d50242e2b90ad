"""How a board is recognised: its profile is compared with what the machine reports about itself.

This is pure. `edge_agent.probes.board_identity` reads the machine.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta, Struct

_Beginning = Annotated[str, Meta(min_length=1, max_length=100)]
_Beginnings = tuple[_Beginning, ...]


@dataclass(frozen=True)
class Machine:
    """What a machine reports about itself; None: it reports nothing.

    Attributes:
        model: the maker's name for it, from the device tree, Android's properties or a PC's firmware (DMI).
        processor: name of the processor on x86, names of its kinds of core on ARM.
        android: True if Android runs on it.
        memory_bytes: fitted memory, without what the kernel reserves.
    """

    model: str | None
    processor: str | None
    android: bool
    memory_bytes: int | None


class Recognition(Struct, frozen=True, forbid_unknown_fields=True):
    """The table `[recognise]` of a board's file. Every key in it must match.

    Attributes:
        model: possible beginnings of the machine's model.
        processor: possible beginnings of its processor's name.
        android: True if Android must run on it.
        min_memory_mib: least memory in MiB that it must report; 0: any.
    """

    model: _Beginnings = ()
    processor: _Beginnings = ()
    android: bool = False
    min_memory_mib: Annotated[int, Meta(ge=1, le=4_194_304)] = 0

    def __post_init__(self) -> None:
        if not (self.model or self.processor or self.android or self.min_memory_mib):
            raise ValueError("the table is empty; give model, processor, android or min_memory_mib")

    def fit(self, machine: Machine) -> tuple[int, int, bool, int] | None:
        """How well this matches the machine, larger is better; None: it does not match.

        Values are compared in this order: length of the matching beginning of the model, then of the
        processor, then whether Android is required, then the required memory.
        """
        model = _longest(self.model, machine.model)
        processor = _longest(self.processor, machine.processor)
        wanted_bytes = self.min_memory_mib * 2**20
        if model is None or processor is None or (self.android and not machine.android):
            return None
        if wanted_bytes and (machine.memory_bytes is None or machine.memory_bytes < wanted_bytes):
            return None
        return model, processor, self.android, self.min_memory_mib


def closest(boards: Mapping[str, Recognition], machine: Machine) -> str | None:
    """Name of the board that matches the machine best; None: none matches.

    Of two equal matches, the first in alphabetical order wins.
    """
    fits = {name: fit for name, board in sorted(boards.items()) if (fit := board.fit(machine)) is not None}
    return max(fits, key=fits.__getitem__, default=None)


def _longest(beginnings: _Beginnings, name: str | None) -> int | None:
    """Length of the longest of `beginnings` with which `name` begins.

    It is 0 if `beginnings` is empty, and None if `name` has none of them.
    """
    if not beginnings:
        return 0
    return max(
        (len(start) for start in beginnings if name is not None and name.startswith(start)), default=None
    )
