"""Decides about a device's request to join: the registry and the authority go in, the answer comes out.

All changes of one request are one transaction of the registry, which ends before the answer leaves. So a
crash, or an answer that is lost, costs nothing: the device sends the same request again.
"""

import base64
import secrets
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from fleetune.coordinator.fleet.authority import Authority, DeviceKey, device_ends_at, device_key
from fleetune.coordinator.fleet.fleet_address import FleetAddress
from fleetune.coordinator.fleet.invitations import sha256_of
from fleetune.coordinator.fleet.registry import RegisteredDevice, Registry, StoredInvitation
from fleetune.coordinator.fleet.secret_hash import hash_of
from fleetune.protocols.errors import FleetuneError, PacketCorrupt
from fleetune.protocols.wire.identity import MAX_NAME
from fleetune.protocols.wire.join_exchange import Joined, JoinPending, JoinRequest
from fleetune.protocols.wire.messages import readable
from fleetune.protocols.wire.topics import COORDINATOR_USER, PROBE, valid_name

PENDING_S = 10.0  # after which a device that waits for approval asks again
MAX_DEVICE_ID = 64 - len(f"~{PROBE}")  # a common name has at most 64 characters
MIN_NONCE = 16
_ANOTHER = "ask for another line of `edge-coordinator invite`"

Cause = Literal[
    "fleet", "code", "used", "expired", "withdrawn", "revoked", "taken", "id", "request", "ended", "connected"
]


class JoinError(FleetuneError):
    """A device may not join.

    Attributes:
        cause: the kind of the reason, by which refusals are counted.
    """

    def __init__(self, cause: Cause, line: str) -> None:
        super().__init__(line)
        self.cause = cause


@dataclass(frozen=True)
class _Wish:
    """A request, and the key that proves that a later request is from the same device.

    Attributes:
        request: the request.
        key: SHA-256 of the device's public key, or of its nonce.
        device_key: its public key; None for a device with a secret.
    """

    request: JoinRequest
    key: str
    device_key: DeviceKey | None


def join(
    registry: Registry, authority: Authority, address: FleetAddress, request: JoinRequest, now: float
) -> Joined | JoinPending:
    """Let a device join, or say that it must wait for approval.

    Args:
        registry: the fleet's registry.
        authority: the fleet's authority.
        address: the fleet's address.
        request: what the device has sent.
        now: seconds since 1970.

    Raises:
        JoinError: the device may not join; the registry is unchanged.
        StoreError: the registry or the authority cannot be read or written.
    """
    wish = _wish(registry, request)
    with registry.step():
        device, is_repeated = _admitted(registry, wish, now)
        if device.state == "revoked":
            line = f"the device {device.id} was revoked; `edge-coordinator approve {device.id}` undoes it"
            raise JoinError("revoked", line)
        if device.state == "pending":
            return JoinPending(device.id, PENDING_S)
        if device.bundle != authority.bundle_id:
            registry.note_bundle(device.id, authority.bundle_id)
        if wish.device_key is None:
            secret = _new_secret(registry, device, now, is_repeated=is_repeated)
            return _joined(device, address.secret_port, authority, now, secret=secret)
        pair = _certificates(registry, authority, device, wish.device_key, now, is_repeated=is_repeated)
        return _joined(device, address.port, authority, now, pair)


def _wish(registry: Registry, request: JoinRequest) -> _Wish:
    if request.fleet != registry.path.parent.name:
        raise JoinError("fleet", f"this coordinator has no fleet {request.fleet!r}; {_ANOTHER}")
    if request.signing_request:
        try:
            key = device_key(request.signing_request)
        except PacketCorrupt as problem:
            raise JoinError("request", str(problem)) from None
        return _Wish(request, key.sha256, key)
    if len(request.nonce) < MIN_NONCE:
        raise JoinError(
            "request",
            "neither a signing request nor a nonce is given; send one of them, a nonce of at least"
            f" {MIN_NONCE} random characters",
        )
    return _Wish(request, sha256_of(request.nonce), None)


def _admitted(registry: Registry, wish: _Wish, now: float) -> tuple[RegisteredDevice, bool]:
    """Return the device of a request, and True if this code has admitted it before; take a use of the code
    otherwise.
    """
    invitation = registry.invitation(sha256_of(wish.request.code))
    if invitation is None:
        raise JoinError("code", f"no invitation has this code; copy the whole line, or {_ANOTHER}")
    known = registry.device_with_key(wish.key)
    if known is not None and registry.joined_with(invitation.id, wish.key) is not None:
        return known, True
    _check_open(registry, invitation, now)
    device = _new_device(registry, invitation, wish, now) if known is None else _again(known, invitation)
    if device.state != "revoked":
        registry.put(device)
        registry.note_joining(invitation.id, wish.key, device.id, now)
    return device, False


def _check_open(registry: Registry, invitation: StoredInvitation, now: float) -> None:
    name = f"the invitation {invitation.id}"
    if invitation.withdrawn:
        raise JoinError("withdrawn", f"{name} was withdrawn; {_ANOTHER}")
    if now >= invitation.expires_at:
        minutes = (now - invitation.expires_at) / 60
        raise JoinError("expired", f"{name} expired {minutes:.0f} minutes ago; {_ANOTHER}")
    if invitation.uses_left < 1:
        used = registry.devices_of(invitation.id)
        by = f"by {used[0]}" if len(used) == invitation.devices == 1 else f"{invitation.devices} times"
        raise JoinError("used", f"{name} has been used {by}; {_ANOTHER}")


def _again(device: RegisteredDevice, invitation: StoredInvitation) -> RegisteredDevice:
    """Return a known device that joins with another invitation."""
    tags = tuple(dict.fromkeys(device.tags + invitation.tags))
    is_accepted = device.state == "pending" and not invitation.approve
    return replace(device, tags=tags, state="accepted" if is_accepted else device.state)


def _new_device(
    registry: Registry, invitation: StoredInvitation, wish: _Wish, now: float
) -> RegisteredDevice:
    name = readable(wish.request.name)[:MAX_NAME]
    device = _new_id(registry, wish, name)
    return RegisteredDevice(
        id=device,
        name=name or device,
        renamed=False,
        kind="secret" if wish.device_key is None else "certificate",
        state="pending" if invitation.approve else "accepted",
        tags=invitation.tags,
        key=wish.key,
        secret="",
        ends_at=None,
        authority="",
        bundle="",
        joined_at=now,
        last_seen=None,
        agent=readable(wish.request.agent),
    )


def _new_id(registry: Registry, wish: _Wish, name: str) -> str:
    """Return the id that the device asks for, or one like its name."""
    wanted = wish.request.device
    if wanted is not None:
        if len(wanted) > MAX_DEVICE_ID or wanted == COORDINATOR_USER or wanted.startswith("-"):
            raise JoinError(
                "id",
                f"the id {wanted!r} cannot be used; give another one with --device, of at most"
                f" {MAX_DEVICE_ID} characters, without '-' at its start, and not {COORDINATOR_USER!r}",
            )
        if registry.is_known(wanted):
            raise JoinError(
                "taken",
                f"another device has the id or name {wanted!r}; give another one with --device. If it is this"
                " device, which has lost its key, `edge-coordinator forget` frees the id",
            )
        return wanted
    suffix = base64.b32encode(bytes.fromhex(wish.key)).decode().lower().rstrip("=")
    like = valid_name(name)[: MAX_DEVICE_ID - 17] or "device"
    # a device without a name is told from others by its key
    tried = [*([like] if name else []), f"{like}-{suffix[:4]}", f"{like}-{suffix[:16]}"]
    free = (one for one in tried if one != COORDINATOR_USER and not registry.is_known(one))
    return next(free, suffix)


def _new_secret(registry: Registry, device: RegisteredDevice, now: float, *, is_repeated: bool) -> str:
    """Return a new secret of a device; the old one is void, because its answer was lost."""
    if is_repeated and device.last_seen is not None:
        raise JoinError("connected", f"the device {device.id} has its secret already; {_ANOTHER}")
    secret = secrets.token_urlsafe(24)
    registry.note_secret(device.id, hash_of(secret), ends_at=device_ends_at(now))
    return secret


def _certificates(
    registry: Registry,
    authority: Authority,
    device: RegisteredDevice,
    key: DeviceKey,
    now: float,
    *,
    is_repeated: bool,
) -> tuple[str, str]:
    """Return a device's certificates: for a request that is repeated, the same ones while they are valid."""
    stored = registry.certificates(device.id)
    if is_repeated and stored is not None and device.ends_at is not None:
        if now >= device.ends_at:
            raise JoinError("ended", f"the certificate of {device.id} has expired; {_ANOTHER}")
        if device.authority in authority.fingerprints:
            return stored
    made = authority.certify(key, device.id, now)
    pair = made.certificate, made.probe_certificate
    registry.note_certificates(device.id, pair, made.serials, ends_at=made.ends_at, authority=made.authority)
    return pair


def _joined(
    device: RegisteredDevice,
    port: int,
    authority: Authority,
    now: float,
    certificates: tuple[str, str] = ("", ""),
    *,
    secret: str = "",
) -> Joined:
    own, probe = certificates
    return Joined(device.id, device.name, port, authority.bundle, own, probe, secret, now)
