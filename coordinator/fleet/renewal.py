"""Renews the certificates of devices: decides which are due, and signs requests."""

from collections.abc import Mapping

from msgspec.structs import replace

from fleetune.coordinator.fleet.authority import DAY_S, DEVICE_DAYS, RENEWED_AFTER, Authority, device_key
from fleetune.coordinator.fleet.fleet_folder import FleetFolder
from fleetune.coordinator.fleet.registry import RegisteredDevice, Registry
from fleetune.protocols.errors import PacketCorrupt, PacketError, PacketForeign
from fleetune.protocols.wire.messages import Renewed


def is_renewal_due(device: RegisteredDevice, authority: str, bundle: str, now: float) -> bool:
    """True if two thirds of a certificate's life are over, or the device does not know the present authority.

    Args:
        device: a device of the registry.
        authority: fingerprint of the authority that signs.
        bundle: `Authority.bundle_id`.
        now: seconds since 1970.
    """
    if device.kind != "certificate" or device.shut_out(now) or device.ends_at is None:
        return False
    has_newest = device.authority == authority and device.bundle == bundle
    return not has_newest or device.ends_at - now < DEVICE_DAYS * DAY_S * (1 - RENEWED_AFTER)


def renew(files: FleetFolder, requests: Mapping[str, str], now: float) -> dict[str, Renewed | PacketError]:
    """Sign the requests of devices. Call it in a child process, because it imports `cryptography`.

    Args:
        files: the fleet's folder.
        requests: signing requests in PEM, by the id of the device.
        now: seconds since 1970.

    Returns:
        By device, its answer, or why it gets none.

    Raises:
        StoreError: the registry or the authority cannot be read or written.
    """
    authority, answers = Authority.open(files, now), dict[str, Renewed | PacketError]()
    with Registry.open(files.registry) as registry:
        for device, request in requests.items():
            try:
                answers[device] = _renewed(registry, authority, device, request, now)
            except PacketError as problem:
                answers[device] = problem
    return answers


def _renewed(registry: Registry, authority: Authority, device: str, request: str, now: float) -> Renewed:
    """Return the certificates for a request; a repeated request gets the same ones. Raises PacketError."""
    key, bundle = device_key(request), authority.bundle
    with registry.step():
        known, owner = registry.device(device), registry.device_with_key(key.sha256)
        if known is None or known.kind != "certificate" or known.shut_out(now):
            raise PacketForeign("a Renew of a device that has no certificate of this fleet")
        if owner is not None and owner.id != device:
            raise PacketCorrupt("a Renew with the key of another device; make a new key")
        stored = registry.certificates(device)
        trusted = authority.fingerprint, authority.bundle_id
        if owner is not None and stored is not None and not is_renewal_due(known, *trusted, now):
            return Renewed(*stored, bundle)
        made = authority.certify(key, device, now)
        pair = made.certificate, made.probe_certificate
        registry.put(replace(known, key=key.sha256))
        registry.note_certificates(device, pair, made.serials, ends_at=made.ends_at, authority=made.authority)
        registry.note_bundle(device, authority.bundle_id)
    return Renewed(*pair, bundle)
