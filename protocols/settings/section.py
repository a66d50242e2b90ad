"""What the sections of run.toml are made of: their base, and what several of them take."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from fleetune.protocols.bounds import MAX_NUMBER

Fraction = Annotated[float, Meta(ge=0, lt=1)]
Count = Annotated[int, Meta(ge=1, le=MAX_NUMBER)]
PROCESSOR = "cpu"  # what trains unless it is said, as torch calls it
Precision = Literal["float32", "bfloat16"]  # that training steps compute in, see `FleetSection`


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the sections: immutable, and a misspelt key is an error."""
