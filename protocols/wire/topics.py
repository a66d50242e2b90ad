"""Topic names: fleetune/v1/<fleet>/<device>/<channel>.

A device may write `state`, `up` and `update`, read `down` and `task`, and do both with `probe`, all below its
own name. It has no other rights. The coordinator reads and writes below the whole fleet, except `probe`,
where a device measures its link. Small control messages have their own channels (`up`, `down`), so that they
never wait behind a payload (`update`, `task`). Coordinators find each other on a separate topic, which no
device may write or read.
"""

import re
from typing import Literal, NamedTuple

from fleetune.protocols.errors import PacketForeign, SettingError

Channel = Literal["state", "up", "update", "down", "task", "probe"]
FROM_DEVICE: tuple[Channel, ...] = ("state", "up", "update")
TO_DEVICE: tuple[Channel, ...] = ("down", "task")

COORDINATOR_USER = "coordinator"  # on brokers whose users have rights
ROOT = "fleetune/v1"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
# the role marks a second connection, see `client_id`
_NAME_AND_ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}(~[a-z]{1,16})?")
PROBE: Channel = "probe"


class Address(NamedTuple):
    """The parts of a topic: fleet, device and channel."""

    fleet: str
    device: str
    channel: str


def check_name(name: str, what: str) -> str:
    """Return `name` if it is valid in a topic and in a certificate's common name.

    Raises:
        SettingError: the name has other characters than letters, digits, `_` and `-`, or more than 64.
    """
    if not _NAME.fullmatch(name):
        valid = valid_name(name)
        advice = f"; use {valid}" if valid else ""
        raise SettingError(f"{what} {name!r}: use 1 to 64 letters, digits, '_' or '-'{advice}")
    return name


def valid_name(text: str) -> str:
    """Return a name like `text` that `check_name` accepts; "" if `text` has no ASCII letters or digits."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-")[:64]


def topic(fleet: str, device: str, channel: Channel) -> str:
    return f"{ROOT}/{fleet}/{device}/{channel}"


def client_id(fleet: str, device: str, role: str = "", *, joined: bool) -> str:
    """Return the client id of a device's connection to its broker; `role` marks a second connection.

    A broker of one fleet, which the device has joined, identifies the device by this id. Other brokers may
    serve many fleets.
    """
    if joined:
        return f"{device}~{role}" if role else device
    return "-".join(filter(None, (fleet, device, role)))


def coordinator_id(fleet: str, nonce: str = "") -> str:
    """Return the client id of a coordinator's connection. No device can have it, because of the `~`."""
    return f"coordinator~{'-'.join(filter(None, (fleet, nonce)))}"


def probe(fleet: str, device: str, *, joined: bool) -> tuple[str, str]:
    """Return the client id and the topic of a device's second connection, which measures its link."""
    return (
        client_id(fleet, device, PROBE, joined=joined),
        topic(fleet, probe_name(device, joined=joined), PROBE),
    )


def probe_name(device: str, *, joined: bool) -> str:
    """Return the device's name in the topics of its second connection, which tests and measures the link."""
    return f"{device}~{PROBE}" if joined else device


def device_subscriptions(fleet: str, device: str) -> list[str]:
    return [topic(fleet, device, channel) for channel in TO_DEVICE]


def coordinator_subscriptions(fleet: str) -> list[str]:
    return [f"{ROOT}/{fleet}/+/{channel}" for channel in FROM_DEVICE]


def coordinators(fleet: str) -> str:
    """Return the topic on which a fleet's coordinator and possible successors announce themselves.

    No device's name contains a `~`, so no device has this topic.
    """
    return f"{ROOT}/{fleet}/~coordinator/here"


def parse(name: str, *, with_role: bool = False) -> Address:
    """Return the parts of a topic.

    Args:
        name: the topic.
        with_role: True if a role may follow the device's name, as for a device's second connection.

    Raises:
        PacketForeign: the topic is not a Fleetune topic.
    """
    parts, device = name.split("/"), _NAME_AND_ROLE if with_role else _NAME
    if (
        len(parts) != 5
        or name[: len(ROOT)] != ROOT
        or not (_NAME.fullmatch(parts[2]) and device.fullmatch(parts[3]))
    ):
        raise PacketForeign(f"topic {name!r} is not fleetune/v1/<fleet>/<device>/<channel>")
    return Address(*parts[2:])
