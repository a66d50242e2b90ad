"""Replaces a fleet's authority while its devices stay connected.

1. The new authority signs, and both are trusted. Devices that know only the old one accept the server,
   because the old authority has signed the new one.
2. Connected devices get the new authority, and certificates that it has signed.
3. When all accepted devices with certificates have these, and 30 days are over, the old authority is dropped.
   A device whose answer was lost asks again in this time. Devices with secrets go on with the old
   authority's certificate until it ends.
"""

from collections.abc import Sequence

from fleetune.coordinator.fleet.access_files import write_access_files
from fleetune.coordinator.fleet.authority import DAY_S, Authority
from fleetune.coordinator.fleet.fleet_address import FleetAddress, names_of_this_machine
from fleetune.coordinator.fleet.registry import RegisteredDevice, Registry
from fleetune.protocols.errors import SettingError

KEPT_DAYS = 30
_KEPT = f"The old one is trusted until all have the new one, but for at least {KEPT_DAYS} days"
_NAMED = 5


def rotate(authority: Authority, registry: Registry, now: float, *, at_once: bool) -> str:
    """Begin to replace the authority, and return what happens next.

    Args:
        authority: the fleet's authority.
        registry: the fleet's registry.
        now: seconds since 1970.
        at_once: True to trust no authority but a new one from now on, so that every device must join again.

    Raises:
        SettingError: a replacement is under way, and `at_once` is False.
        StoreError: a file is damaged, or cannot be read or written.
    """
    if not at_once and len(authority.fingerprints) > 1:
        waiting = listed(devices_of_old(authority, registry, now))
        raise SettingError(
            f"the authority is being replaced; still need the old one: {waiting}. {_KEPT}; revoke a device"
            " that will not come back"
        )
    with registry.step():  # no device joins or renews meanwhile
        if at_once:
            registry.end_all(now)
        authority.rotate(now, at_once=at_once)
    authority.renew_server([*FleetAddress.read(authority.folder).hosts, *names_of_this_machine()], now)
    write_access_files(authority, registry, now)
    if at_once:
        accepted = [one for one in registry.devices() if one.state == "accepted"]
        return f"no earlier authority is trusted any more; {listed(accepted)} must join again"
    return f"devices get the new authority while they are connected. {_KEPT}"


def listed(devices: Sequence[RegisteredDevice]) -> str:
    """Return the number of devices, and the names of the first ones."""
    names = ", ".join(str(one) for one in devices[:_NAMED])
    more = ", ..." if len(devices) > _NAMED else ""
    number = "1 device" if len(devices) == 1 else f"{len(devices)} devices"
    return f"{number} ({names}{more})" if devices else number


def devices_of_old(authority: Authority, registry: Registry, now: float) -> list[RegisteredDevice]:
    """Return the devices that lack the present bundle, or a certificate of the authority that signs.

    Devices that may not connect at `now` (seconds since 1970) are not among them, and none with secrets,
    because nothing can be sent to them.
    """
    bundle, signer = authority.bundle_id, authority.fingerprint
    return [
        one
        for one in registry.devices()
        if one.kind == "certificate"
        and not one.shut_out(now)
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
    if devices_of_old(authority, registry, now):
        return False
    authority.drop_old()
    return True
