"""The passwords of a fleet's embedded broker: created once, readable by their owner only, never logged.

One password is for the devices, the other for the coordinator. The broker's files hold salted hashes.
"""

import secrets
from pathlib import Path

import msgspec
from msgspec import Struct

from fleetune.coordinator.fleet.secret_hash import hash_of
from fleetune.protocols.errors import StoreError
from fleetune.protocols.files import write_atomically
from fleetune.protocols.wire.topics import COORDINATOR_USER, JOIN_USER

FOLDER = ".fleets"  # next to the runs, because a fleet outlives each of them


class Credentials(Struct, frozen=True):
    """The passwords of one fleet.

    Attributes:
        join: the devices' password.
        coordinator: the coordinator's password.
    """

    join: str
    coordinator: str

    def __repr__(self) -> str:  # without the passwords, for logs
        return "Credentials(...)"

    def password_file(self) -> str:
        """Return the hashed passwords in mosquitto's format."""
        users = {JOIN_USER: self.join, COORDINATOR_USER: self.coordinator}
        return "".join(f"{user}:{hash_of(password)}\n" for user, password in users.items())


def credentials_of(fleet: str, runs: Path) -> Credentials:
    """Return the fleet's passwords; create them if there are none.

    They are stored in `runs/.fleets/<fleet>.json`, which only its owner can read.

    Raises:
        StoreError: the file is damaged, or cannot be written.
    """
    path = runs / FOLDER / f"{fleet}.json"
    try:
        if path.exists():
            return msgspec.json.decode(path.read_bytes(), type=Credentials)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = Credentials(secrets.token_urlsafe(12), secrets.token_urlsafe(24))
        write_atomically(path, msgspec.json.encode(made), mode=0o600)
    except OSError as problem:
        raise StoreError(
            f"{path}: {problem.strerror}; the fleet's passwords are stored there, so make it readable and"
            " writable"
        ) from None
    except msgspec.MsgspecError:
        raise StoreError(
            f"{path} is damaged: restore it from a backup, or delete it to create new passwords"
        ) from None
    return made
