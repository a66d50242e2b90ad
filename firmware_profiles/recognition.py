"""How a board is recognised: what its file says of it, held against what the machine at hand tells of itself.

Pure: `edge_agent.probes.board_identity` reads the machine.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta, Struct

_Beginning = Annotated[str, Meta(min_length=1, max_length=100)]
_Beginnings = tuple[_Beginning, ...]


@dataclass(frozen=True)
class Machine:
    """What a machine tells of itself; None: it does not tell.

    Attributes:
        model: its maker's name for it, from the device tree, Android's properties or a PC's firmware (DMI).
        processor: its name on x86, the names of its kinds of core on ARM.
        android: whether Android runs on it.
        memory_bytes: memory that is fitted, without what the kernel keeps.
    """

    model: str | None
    processor: str | None
    android: bool
    memory_bytes: int | None


class Recognition(Struct, frozen=True, forbid_unknown_fields=True):
    """The table `[recognise]` of a board's file: every key that is there must hold.

    Attributes:
        model: how the machine's model begins: one of these.
        processor: how its processor's name begins: one of these.
        android: true: Android must run on it.
        min_memory_mib: it has at least this much memory, and tells so; 0: any.
    """

    model: _Beginnings = ()
    processor: _Beginnings = ()
    android: bool = False
    min_memory_mib: Annotated[int, Meta(ge=1, le=4_194_304)] = 0

    def __post_init__(self) -> None:
        if not (self.model or self.processor or self.android or self.min_memory_mib):
            raise ValueError("it says nothing; give model, processor, android or min_memory_mib")

    def fit(self, machine: Machine) -> tuple[int, int, bool, int] | None:
        """How closely it describes the machine, greater is closer; None: it describes another.

        What decides is, in this order: the length of the beginning that the model has, that of the
        processor's, whether Android is asked for, and how much memory is.
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
    """The board that describes the machine most closely, None when none does.

    Of two that do so alike it is the first by the alphabet.
    """
    fits = {name: fit for name, board in sorted(boards.items()) if (fit := board.fit(machine)) is not None}
    return max(fits, key=fits.__getitem__, default=None)


def _longest(beginnings: _Beginnings, name: str | None) -> int | None:
    """Length of the longest of `beginnings` that `name` has; 0: none is asked for; None: `name` has none."""
    if not beginnings:
        return 0
    return max(
        (len(start) for start in beginnings if name is not None and name.startswith(start)), default=None
    )
