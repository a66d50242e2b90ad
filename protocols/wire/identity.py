"""The identity of a device: its id, its name for people, and how the coordinator knows it.

A topic, a client id or a name is not an identity by itself. All code that refers to a device uses an
`Identity`:
sessions, the run's store, queries and log lines.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from fleetune.protocols.bounds import FleetName
from fleetune.protocols.errors import SettingError

KnownBy = Literal["claim", "login", "certificate", "secret"]
MAX_NAME = 64
DisplayName = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]


def check_display_name(name: str, what: str = "--name") -> str:
    """Return a device's name for people if it is valid. Raises SettingError."""
    if not (0 < len(name) <= MAX_NAME and name.isprintable() and name.strip()):
        raise SettingError(f"{what} {name!r} is invalid: use 1 to {MAX_NAME} printable characters")
    return name


class Identity(Struct, frozen=True):
    """The identity of a device of a fleet.

    Attributes:
        id: stable id. It is part of topics, client ids, stored rows and the keys of random draws.
        name: label for people. The owner may change it, and two devices may have the same one.
        known_by: how the coordinator knows the id. "certificate" or "secret": the device got it when it
            joined the fleet. "login": the broker lets only the device's own login use the device's topics.
            "claim": the device has claimed the id without proof.
    """

    id: FleetName
    name: DisplayName
    known_by: KnownBy = "claim"

    @classmethod
    def of(cls, device: str) -> "Identity":
        """Return the identity of a device whose name is its id."""
        return cls(device, device)

    def __str__(self) -> str:
        """Return the name, followed by the id if they differ."""
        return self.id if self.name == self.id else f"{self.name} ({self.id})"
