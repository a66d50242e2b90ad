"""The passwords of a fleet's embedded broker: created once, readable by their owner only, never logged.

One password is for the devices, the other for the coordinator. The broker's files hold salted hashes.
"""

import base64
import hashlib
import hmac
import secrets
from pathlib import Path

import msgspec
from msgspec import Struct

from fleetune.protocols.errors import StoreError
from fleetune.protocols.files import write_atomically
from fleetune.protocols.wire.topics import COORDINATOR_USER, JOIN_USER

FOLDER = ".fleets"  # next to the runs, because a fleet outlives each of them
ITERATIONS = 101  # mosquitto's default; enough, because the passwords are random and long
_SALT_BYTES = 12


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
        """Return the hashed passwords in mosquitto's format.

        A line is `user:$7$iterations$salt$hash`, hashed by PBKDF2 with SHA-512.
        """
        users = {JOIN_USER: self.join, COORDINATOR_USER: self.coordinator}
        return "".join(f"{user}:{_hashed(password)}\n" for user, password in users.items())


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


def is_password(password: str, hashed: str) -> bool:
    """True if `password` matches a line of `password_file`, given without the user's name."""
    try:
        _, kind, iterations, salt, known = hashed.split("$")
        made = _derived(password, base64.b64decode(salt), int(iterations))
    except ValueError:
        return False
    return kind == "7" and hmac.compare_digest(made, base64.b64decode(known))


def _hashed(password: str) -> str:
    salt = secrets.token_bytes(_SALT_BYTES)
    parts = (salt, _derived(password, salt, ITERATIONS))
    return "$".join(["", "7", str(ITERATIONS), *(base64.b64encode(part).decode() for part in parts)])


def _derived(password: str, salt: bytes, iterations: int) -> bytes:
    return hashlib.pbkdf2_hmac("sha512", password.encode(), salt, iterations)
