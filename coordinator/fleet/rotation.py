"""Replaces a fleet's authority while its devices stay connected.

1. The new authority signs, and both are trusted. Devices that know only the old one accept the server,
   because the old authority has signed the new one.
2. Connected devices get the new authority, and certificates that it has signed.
3. When all accepted devices with certificates have these, and 30 days are over, the old authority is dropped.
   A device whose answer was lost asks again in this time. Devices with secrets go on with the old
   authority's certificate until it ends.
"""

from fleetune.coordinator.fleet.access_files import write_access_files
from fleetune.coordinator.fleet.authority import DAY_S, Authority
from fleetune.coordinator.fleet.fleet_address import FleetAddress, names_of_this_machine
from fleetune.coordinator.fleet.registry import RegisteredDevice, Registry
from fleetune.protocols.errors import SettingError

KEPT_DAYS = 30
_NAMED = 5


def rotate(authority: Authority, registry: Registry, now: float, *, at_once: bool) -> str:
    """Begin to replace the authority, and return what happens next.

    Args:
        authority: the fleet's authority.
        registry: the fleet's registry.
        now: seconds since 1970.
        at_once: True to stop trusting the old authority now. If a replacement is under way, it ends.

    Raises:
        SettingError: a replacement is under way, and `at_once` is False.
        StoreError: a file is damaged, or cannot be read or written.
    """
    waiting = devices_of_old(authority, registry)
    if len(authority.fingerprints) == 1:
        authority.rotate(now, at_once=at_once)
        waiting = [one for one in registry.devices() if one.state == "accepted"]
    elif at_once:
        authority.drop_old()
    else:
        raise SettingError(
            f"the authority is being replaced; {_listed(waiting)} still need the old one. It is trusted for"
            f" {KEPT_DAYS} days or more; --now ends this, and devices that need it must join again"
        )
    authority.renew_server([*FleetAddress.read(authority.folder).hosts, *names_of_this_machine()], now)
    write_access_files(authority, registry, now)
    if at_once:
        return f"the old authority is no longer trusted; {_listed(waiting)} must join again"
    return "devices get the new authority while they are connected; the old one is trusted until all have it"


def _listed(devices: list[RegisteredDevice]) -> str:
    names = ", ".join(str(one) for one in devices[:_NAMED])
    more = ", ..." if len(devices) > _NAMED else ""
    return f"{len(devices)} devices ({names}{more})" if devices else "0 devices"


def devices_of_old(authority: Authority, registry: Registry) -> list[RegisteredDevice]:
    """Return the accepted devices that lack the present bundle, or a certificate of the authority that signs.

    Devices with secrets are not among them, because nothing can be sent to them.
    """
    bundle, signer = authority.bundle_id, authority.fingerprint
    return [
        one
        for one in registry.devices()
        if one.kind == "certificate"
        and one.state == "accepted"
        and (one.bundle, one.authority) != (bundle, signer)
    ]


def finish_rotation(authority: Authority, registry: Registry, now: float) -> bool:
    """Drop old authorities if no device needs them any more, and return True if some were dropped.

    Args:
        authority: the fleet's authority.
        registry: the fleet's registry.
        now: seconds since 1970.

    Raises:
        StoreError: a file is damaged, or cannot be read or written.
    """
    if len(authority.fingerprints) == 1 or now - authority.made_at < KEPT_DAYS * DAY_S:
        return False
    if devices_of_old(authority, registry):
        return False
    authority.drop_old()
    return True
