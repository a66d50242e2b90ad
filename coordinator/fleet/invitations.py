"""Makes and withdraws invitations: codes with which devices join a fleet."""

import base64
import hashlib
import secrets
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from fleetune.coordinator.fleet.registry import Registry, StoredInvitation
from fleetune.protocols.errors import SettingError
from fleetune.protocols.one_line import suggestion
from fleetune.protocols.wire.join_exchange import CODE_LENGTH

MAX_DEVICES = 100_000
MAX_TAGS, MAX_TAG = 10, 64  # of an invitation; characters of one
KEPT_S = 30 * 86_400.0  # how long an invitation that has ended stays in the list
_ID_BYTES = 4


class InvitationStatus(Struct, frozen=True):
    """One JSON object of `edge-coordinator invites --json`.

    Attributes:
        id: a short name of it, which is no secret.
        state: "open", "used" by as many devices as it allows, "expired" or "withdrawn".
        devices: number of devices that may join with it.
        made_at, expires_at: seconds since 1970.
        tags: tags of the devices that join with it.
        approve: True if an operator must approve each device.
        used: number of devices that joined with it.
        joined: ids of those that are not forgotten.
    """

    id: str
    state: Literal["open", "used", "expired", "withdrawn"]
    devices: int
    made_at: float
    expires_at: float
    tags: tuple[str, ...]
    approve: bool
    used: int
    joined: list[str]


def invite(
    registry: Registry,
    now: float,
    *,
    devices: int = 1,
    expires_s: float = 600.0,
    tags: tuple[str, ...] = (),
    approve: bool = False,
) -> tuple[StoredInvitation, str]:
    """Store a new invitation, and return it with its code, which is stored nowhere.

    Args:
        registry: the fleet's registry.
        now: seconds since 1970.
        devices: number of devices that may join with it.
        expires_s: seconds until it ends.
        tags: tags of these devices.
        approve: True if an operator must approve each of them.

    Raises:
        SettingError: a tag is invalid.
        StoreError: the registry cannot be written.
    """
    _check_tags(tags)
    code = _random(CODE_LENGTH * 5 // 8)[:CODE_LENGTH]
    made = StoredInvitation(
        _random(_ID_BYTES), sha256_of(code), devices, devices, now, now + expires_s, tags, approve
    )
    with registry.step():
        registry.drop_invitations(now - KEPT_S)
        registry.put_invitation(made)
    return made, code


def withdraw(registry: Registry, name: str) -> StoredInvitation:
    """Let no more devices join with an invitation, and return it. Raises SettingError."""
    with registry.step():
        found = {one.id: one for one in registry.invitations()}
        if name not in found:
            advice = suggestion(name, found) if found else "there are none"
            raise SettingError(f"no invitation {name!r} in fleet {registry.path.parent.name}; {advice}")
        registry.put_invitation(replace(found[name], withdrawn=True))
    return found[name]


def withdrawn_lines(ids: list[str]) -> list[str]:
    """Return the line, if any, that says which invitations were withdrawn together with a device."""
    names = ", ".join(ids)
    return [f"withdrawn: its invitation {names}; other devices need a new one"] if ids else []


def status_of(registry: Registry, one: StoredInvitation, now: float) -> InvitationStatus:
    """Return an invitation's state at a time, in seconds since 1970, and the devices that used it."""
    state: Literal["open", "used", "expired", "withdrawn"] = "open"
    if not one.is_open(now):
        state = "withdrawn" if one.withdrawn else "used" if one.uses_left < 1 else "expired"
    joined = registry.devices_of(one.id)
    used = one.devices - one.uses_left
    return InvitationStatus(
        one.id, state, one.devices, one.made_at, one.expires_at, one.tags, one.approve, used, joined
    )


def sha256_of(code: str) -> str:
    """Return the SHA-256 by which the registry knows a code or a nonce, in hexadecimal."""
    return hashlib.sha256(code.encode()).hexdigest()


def _random(num_bytes: int) -> str:
    return base64.b32encode(secrets.token_bytes(num_bytes)).decode().lower().rstrip("=")


def _check_tags(tags: tuple[str, ...]) -> None:
    wrong = [tag for tag in tags if not (0 < len(tag) <= MAX_TAG and tag.isprintable() and tag.strip())]
    if wrong or len(tags) > MAX_TAGS:
        what = f"--tag {wrong[0]!r} is invalid" if wrong else f"{len(tags)} tags are too many"
        raise SettingError(f"{what}; use at most {MAX_TAGS} tags of 1 to {MAX_TAG} printable characters")
