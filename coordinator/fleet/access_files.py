"""The files that tell a broker who may connect: the revocation list, and the hashes of secrets.

They follow from the registry. Commands that change the registry write them, and so does the join server,
which looks at the registry every second. The broker reads them again after SIGHUP.
"""

import hashlib

from fleetune.coordinator.fleet.authority import Authority
from fleetune.coordinator.fleet.registry import Registry
from fleetune.protocols.files import write_atomically
from fleetune.protocols.wire.topics import PROBE


def write_access_files(authority: Authority, registry: Registry, now: float) -> bool:
    """Write both files if their content has changed, and return True if one was written.

    Args:
        authority: it signs the revocation list.
        registry: the devices.
        now: seconds since 1970.

    Raises:
        StoreError: a file is damaged, or cannot be read or written.
    """
    folder = authority.folder
    with authority.locked():  # of two processes, the one that writes last has read last
        passwords = password_lines(registry.secrets(now))
        serials = registry.revoked_serials(now)
        wrote = [_write_list(authority, serials, now)]
        if not folder.passwords.exists() or folder.passwords.read_bytes() != passwords:
            write_atomically(folder.passwords, passwords)
            wrote.append(True)
    return any(wrote)


def password_lines(hashes: list[tuple[str, str]]) -> bytes:
    """Return mosquitto's password file of devices with secrets; both names of a device have the same."""
    users = [(user, hashed) for device, hashed in hashes for user in (device, f"{device}~{PROBE}")]
    return "".join(f"{user}:{hashed}\n" for user, hashed in users).encode()


def _write_list(authority: Authority, serials: list[str], now: float) -> bool:
    """Write the revocation list unless the file is whole, and for the same serial numbers and authorities."""
    path, content = authority.folder.revoked, " ".join([authority.bundle_id, *serials])
    if path.exists() and _is_whole_list(path.read_bytes(), content):
        return False
    made = authority.revocation_list(serials, now)
    write_atomically(path, made, head=_head(content, made))
    return True


def _is_whole_list(file: bytes, content: str) -> bool:
    first, end, made = file.partition(b"\n")
    return first + end == _head(content, made)


def _head(content: str, made: bytes) -> bytes:
    """Return a first line that shows what a list is for, and whether it is damaged; PEM readers ignore it."""
    return f"of {hashlib.sha256(content.encode() + made).hexdigest()}\n".encode()
