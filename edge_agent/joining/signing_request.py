"""Makes keys and signing requests, in a child process that ends at once."""

import os
import subprocess
import sys

import msgspec
from msgspec import Struct

from fleetune.protocols.errors import StoreError
from fleetune.protocols.one_line import flat

_COMMAND = ("-P", "-m", "fleetune.edge_agent.joining.key_maker")
_PATIENCE_S = 300.0  # a small board that trains at the same time


class KeyAndRequest(Struct, frozen=True):
    """A private key and its signing request, both in PEM."""

    key: str
    request: str

    def __repr__(self) -> str:  # without the key, for logs
        return "KeyAndRequest(...)"


def key_and_request(key: str = "") -> KeyAndRequest:
    """Return a new key and a signing request for it, or a request for the given key.

    Args:
        key: private key in PEM; "" makes a new one. It travels through a pipe, so that no list of processes
            shows it.

    Raises:
        StoreError: the child process failed, for example because `cryptography` is not installed.
    """
    path = os.pathsep.join(part or "." for part in sys.path)
    try:
        done = subprocess.run(  # noqa: S603 - our own module
            [sys.executable, *_COMMAND],
            input=key.encode(),
            capture_output=True,
            env={**os.environ, "PYTHONPATH": path},
            timeout=_PATIENCE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise _failed(str(problem)) from None
    if done.returncode:
        raise _failed((done.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1])
    return msgspec.json.decode(done.stdout, type=KeyAndRequest)


def _failed(reason: str) -> StoreError:
    advice = "; install the package cryptography" if "No module" in reason else ""
    return StoreError(f"cannot make this device's key: {flat(reason)[:300]}{advice}")
