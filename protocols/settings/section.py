"""Base class of the sections of run.toml, and the value types that several sections use."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from fleetune.protocols.bounds import MAX_NUMBER

Fraction = Annotated[float, Meta(ge=0, lt=1)]
Count = Annotated[int, Meta(ge=1, le=MAX_NUMBER)]
PROCESSOR = "cpu"  # torch's name of the processor, the default device for training
Precision = Literal["float32", "bfloat16"]  # number format of training steps, see `FleetSection`


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """Base class of the sections: immutable; an unknown key is an error."""
