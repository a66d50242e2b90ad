"""The command with which a device joins a run. The run's folder stores it without the password."""

from pathlib import Path

import msgspec
from msgspec import Struct

from fleetune.coordinator.broker.credentials import credentials_of
from fleetune.coordinator.store.run_folder import BROKER
from fleetune.protocols.errors import StoreError
from fleetune.protocols.files import write_atomically
from fleetune.protocols.wire.topics import JOIN_USER
from fleetune.protocols.wire.transport.mqtt import in_url

FILE = f"{BROKER}/invitation.json"


class Invitation(Struct, frozen=True):
    """How devices reach a run's broker.

    Attributes:
        fleet: name of the run's fleet.
        host, port: address of the broker.
        tls: True if the broker encrypts connections.
        access: "open", "password" (one for the fleet), or "own" (the users of your own broker).
    """

    fleet: str
    host: str
    port: int
    tls: bool = False
    access: str = "open"

    def keep(self, folder: Path) -> None:
        """Write the invitation into the run's folder. Raises StoreError."""
        write_atomically(folder / FILE, msgspec.json.encode(self), mode=0o600)

    def url(self, password: str | None) -> str:
        """Return the broker's URL for `--broker`, with the password of the fleet's devices."""
        user = {"password": f"{JOIN_USER}:{password}@", "own": "USER:PASSWORD@"}.get(self.access, "")
        return f"{'mqtts' if self.tls else 'mqtt'}://{user}{in_url(self.host)}:{self.port}"

    def command(self, password: str | None) -> str:
        """Return the shell command that starts an agent.

        The password is an environment variable in it, so that the process list does not show the password.
        """
        where = f"FLEETUNE_BROKER={self.url(password)}"
        return f"{where} edge-agent run --fleet {self.fleet} --device NAME --data npz:FILE"


def invitation_of(folder: Path) -> tuple[Invitation, str | None]:
    """Return how devices join the run in a folder, and the password of its fleet's devices or None.

    Raises:
        StoreError: no coordinator has served the run, or the file is damaged.
    """
    path = folder / FILE
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Invitation)
    except FileNotFoundError:
        raise StoreError(
            f"{folder}: no coordinator has served this run yet; start edge-coordinator serve"
        ) from None
    except OSError as problem:
        raise StoreError(f"cannot read {path}: {problem.strerror}") from None
    except msgspec.MsgspecError:
        raise StoreError(
            f"{path} is damaged; start edge-coordinator serve again, which rewrites it"
        ) from None
    return found, credentials_of(found.fleet, folder.parent).join if found.access == "password" else None
