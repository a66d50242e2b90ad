"""Section [encoding] of run.toml: how the values of updates and tasks are encoded. The enrolment carries
it.
"""

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
    """Check that each encoding exists and has the given settings. Raises ValueError if not."""
    for choice in choices:
        try:
            encodings.chosen(choice)
        except SettingError as problem:
            raise ValueError(f"encodings: {problem}") from None


class ValueEncodings(Settings, frozen=True):
    """The encodings of both directions, as the enrolment carries them.

    Attributes:
        up: encoding of the values of updates: its name (docs/encodings.md), or a table with its name and
            settings.
        down: encoding of the values of tasks, written in the same way. Task values are differences to a
            reference model, which both sides then keep.
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
    def uplink(self) -> Encoding:
        """The encoding of updates."""
        return encodings.chosen(self.up)

    @property
    def downlink(self) -> Encoding:
        """The encoding of tasks. Raises SettingError if the chosen one is for updates only."""
        return encodings.chosen(self.down).for_tasks()


class EncodingSection(ValueEncodings, frozen=True):
    """[encoding]

    Attributes:
        compact: send control messages as MessagePack arrays instead of JSON, and updates in a shorter frame,
            for thin uplinks. If left out, this holds with `objective.minimise = "bytes"` only.
        quick_masks: send a mask as a plain bitmap if compressing it would cost the device more time than the
            saved bytes are worth. If left out, this holds with `objective.minimise = "time"` or "energy".
    """

    compact: bool | None = None
    quick_masks: bool | None = None

    @property
    def values(self) -> ValueEncodings:
        """The part of the section that the enrolment carries."""
        return ValueEncodings(self.up, self.down)


PLAIN = EncodingSection(encodings.RAW, encodings.RAW)
"""Meaning of an enrolment without `encoding`: values are sent as plain float32."""
