"""The files of one fleet's identities. They lie next to the runs, because a fleet outlives each of them."""

from dataclasses import dataclass
from pathlib import Path

FLEETS = ".fleets"


@dataclass(frozen=True)
class FleetFolder:
    """The folder `runs/.fleets/FLEET`, which only its owner can enter.

    Attributes:
        path: the folder.
        authority_key, authority: key and certificate of the fleet's authority; the second file may hold
            several certificates, the one that signs first.
        server_key, server: key and certificate of broker and join server, signed by the authority.
        revoked: the authority's revocation list, in PEM.
        passwords: mosquitto's password file of the devices that have a secret.
        registry: SQLite file of devices and invitations.
        address: where devices reach the fleet, as the last `serve` found it.
    """

    path: Path

    @classmethod
    def of(cls, fleet: str, runs: Path) -> "FleetFolder":
        """Return the folder of a fleet whose runs are in `runs`."""
        return cls(runs / FLEETS / fleet)

    @property
    def fleet(self) -> str:
        return self.path.name

    @property
    def runs(self) -> Path:
        """The folder of runs that this one lies in."""
        return self.path.parent.parent

    @property
    def authority_key(self) -> Path:
        return self.path / "authority.key"

    @property
    def authority(self) -> Path:
        return self.path / "authority.pem"

    @property
    def server_key(self) -> Path:
        return self.path / "server.key"

    @property
    def server(self) -> Path:
        return self.path / "server.pem"

    @property
    def revoked(self) -> Path:
        return self.path / "revoked.pem"

    @property
    def passwords(self) -> Path:
        return self.path / "passwords"

    @property
    def registry(self) -> Path:
        return self.path / "registry.sqlite"

    @property
    def address(self) -> Path:
        return self.path / "address.json"
