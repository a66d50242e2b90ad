"""run.toml's [encoding]: how values are written on the wire. It travels in the enrolment."""

from collections.abc import Iterable
from typing import Annotated, Any

from msgspec import Meta

from fleetune.protocols.bounds import Label
from fleetune.protocols.errors import SettingError
from fleetune.protocols.settings.section import Settings
from fleetune.protocols.update import encodings
from fleetune.protocols.update.encodings.encoding import Encoding

LOSSLESS = "lossless"

Choice = Label | Annotated[dict[Label, Any], Meta(max_length=20)]


def check_encodings(choices: Iterable[Choice]) -> None:
    """Raises ValueError: there is no such encoding, or it has no such setting."""
    for choice in choices:
        try:
            encodings.chosen(choice)
        except SettingError as problem:
            raise ValueError(f"encodings: {problem}") from None


class ValueEncodings(Settings, frozen=True):
    """How values are written, as the enrolment has it.

    Attributes:
        up: how devices write the values of their updates: the name of an encoding (docs/wire.md), or a
            table of its name and settings.
        down: how the coordinator writes the values of tasks, likewise: as differences to what a device holds,
            which both sides then keep.
    """

    up: Choice = LOSSLESS
    down: Choice = LOSSLESS

    def __post_init__(self) -> None:
        for direction in ("up", "down"):
            try:
                getattr(self, f"{direction}link")
            except SettingError as problem:
                raise ValueError(f"{direction}: {problem}") from None

    @property
    def ways(self) -> dict[str, Choice]:
        """The choice for each direction that has another than the default."""
        choices = {"up": self.up, "down": self.down}
        return {way: choice for way, choice in choices.items() if choice != LOSSLESS}

    @property
    def uplink(self) -> Encoding:
        """What writes updates."""
        return encodings.chosen(self.up)

    @property
    def downlink(self) -> Encoding:
        """What writes tasks."""
        return encodings.chosen(self.down).for_tasks()


class EncodingSection(ValueEncodings, frozen=True):
    """[encoding]

    Attributes:
        compact: control messages as MessagePack arrays instead of JSON, and updates in a shorter frame, for
            thin uplinks. Left out: with `objective.minimise = "bytes"` alone.
        quick_masks: a mask travels as a bitmap where a device would take longer for its code than for the
            bytes that it saves. Left out: with `objective.minimise = "time"` and "energy" alone.
    """

    compact: bool | None = None
    quick_masks: bool | None = None

    @property
    def values(self) -> ValueEncodings:
        """What of it the enrolment has."""
        return ValueEncodings(self.up, self.down)


PLAIN = EncodingSection(encodings.RAW, encodings.RAW)
"""Of an enrolment without `encoding`: values are written unencoded."""
