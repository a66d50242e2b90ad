"""Salted hashes of passwords and secrets, in the format of mosquitto's password file.

A hash is `$7$iterations$salt$hash`, made by PBKDF2 with SHA-512.
"""

import base64
import hashlib
import hmac
import secrets

ITERATIONS = 101  # mosquitto's default; enough, because the passwords are random and long
_SALT_BYTES = 12


def hash_of(secret: str) -> str:
    """Return a salted hash of a secret, as it stands after `user:` in the password file."""
    salt = secrets.token_bytes(_SALT_BYTES)
    parts = (salt, _derived(secret, salt, ITERATIONS))
    return "$".join(["", "7", str(ITERATIONS), *(base64.b64encode(part).decode() for part in parts)])


def is_hash_of(secret: str, hashed: str) -> bool:
    """True if `hashed` is a hash of `secret`."""
    try:
        _, kind, iterations, salt, known = hashed.split("$")
        made = _derived(secret, base64.b64decode(salt), int(iterations))
    except ValueError:
        return False
    return kind == "7" and hmac.compare_digest(made, base64.b64decode(known))


def _derived(secret: str, salt: bytes, iterations: int) -> bytes:
    return hashlib.pbkdf2_hmac("sha512", secret.encode(), salt, iterations)
