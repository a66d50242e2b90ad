"""Writes settings and access rules for the user's own mosquitto (`edge-coordinator broker-config`).

Each device has its own user with the device's name. The coordinator's user is `coordinator`. A user logs in
with a password. With a file of a certificate authority, it logs in with a certificate whose common name is
the user.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fleetune.coordinator.broker.access_rules import fleet_rules
from fleetune.coordinator.broker.embedded_broker import LIMITS
from fleetune.protocols.errors import SettingError, StoreError
from fleetune.protocols.wire.topics import COORDINATOR_USER, check_name

PASSWORDS = "fleetune.passwords"
PORT, TLS_PORT = 1883, 8883

_RULES_HEAD = """\
# Access rules of Fleetune for mosquitto (acl_file), written by `edge-coordinator broker-config`.
# A device's user has the device's name (1 to 64 letters, digits, _ or -). It reaches its own topics only.
# A device measures its link and tests these rules on the topic `probe`.
# Client ids: FLEET-DEVICE, FLEET-DEVICE-probe, coordinator~FLEET and coordinator~FLEET-... (12 hex digits).
# mosquitto drops a forbidden message silently: `edge-agent doctor` shows which right is missing.
"""
_CONFIGURATION_HEAD = """\
# mosquitto's settings for Fleetune, written by `edge-coordinator broker-config`.
# Copy it to /etc/mosquitto/conf.d/, or start mosquitto -c with it.
# Leave use_username_as_clientid off: the coordinator and each agent have two connections with one user, and
# each would end the other.
"""


@dataclass(frozen=True)
class OwnBroker:
    """Settings of a mosquitto that serves one or more fleets.

    Attributes:
        configuration_file, rules_file: names of the files.
        home: the folder that printed files name.
        read_from: where in it the broker reads the configuration.
        fleets: names of the fleets.
        port: port to listen on; None means 8883 with TLS, else 1883.
        cert: PEM file of the broker's certificate, for TLS; requires `key`.
        key: PEM file of the certificate's key.
        ca: PEM file of the authority that signed the clients' certificates; None if clients have passwords.

    Raises:
        SettingError: a fleet's name is invalid, or one of the TLS files is missing.
    """

    configuration_file: ClassVar[str] = "fleetune.conf"
    rules_file: ClassVar[str] = "fleetune.acl"
    home: ClassVar[Path] = Path("/etc/mosquitto")
    read_from: ClassVar[str] = "conf.d/fleetune.conf"
    fleets: Sequence[str]
    port: int | None = None
    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    def __post_init__(self) -> None:
        for fleet in self.fleets:
            check_name(fleet, "fleet")
        if (self.cert is None) != (self.key is None):
            raise SettingError("TLS needs the broker's certificate and its key: give both --cert and --key")
        if self.ca is not None and self.cert is None:
            raise SettingError(
                "--ca (certificates of devices) works only with TLS, which needs --cert and --key of the"
                " broker"
            )

    @property
    def listening_port(self) -> int:
        return self.port or (PORT if self.cert is None else TLS_PORT)

    def rules(self) -> str:
        """Return the content of the file of access rules."""
        return _RULES_HEAD + "\n".join(fleet_rules(fleet) for fleet in self.fleets)

    def configuration(self, folder: Path) -> str:
        """Return the content of the configuration file, which names files in `folder`."""
        lines = [
            f"listener {self.listening_port}",
            f"acl_file {folder / self.rules_file}",
            "allow_anonymous false",
            *LIMITS,
        ]
        if self.cert is not None and self.key is not None:
            lines += [f"certfile {self.cert.absolute()}", f"keyfile {self.key.absolute()}"]
        if self.ca is not None:
            lines += [f"cafile {self.ca.absolute()}", "require_certificate true"]
            lines += ["use_identity_as_username true"]  # the certificate's common name is the user
        else:
            lines += [f"password_file {folder / PASSWORDS}"]
        return _CONFIGURATION_HEAD + "\n".join(lines) + "\n"

    def write(self, folder: Path) -> None:
        """Write the configuration and the access rules into a folder.

        Raises:
            StoreError: a file cannot be written.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / self.rules_file).write_text(self.rules(), encoding="utf-8")
            (folder / self.configuration_file).write_text(
                self.configuration(folder.absolute()), encoding="utf-8"
            )
        except OSError as problem:
            raise StoreError(f"cannot write {folder}: {problem.strerror}") from None

    def next_steps(self, folder: Path) -> str:
        """Return instructions for creating users, as lines of text."""
        if self.ca is not None:
            return f"common names of certificates: {COORDINATOR_USER}, and of each device its name"
        passwords = folder / PASSWORDS
        plain = "without --cert and --key, passwords cross the network unencrypted\n"
        return (
            f"{plain if self.cert is None else ''}"
            f"touch {passwords}   # mosquitto_passwd -c would empty a file that is there\n"
            f"mosquitto_passwd {passwords} {COORDINATOR_USER}   # asks for the coordinator's password\n"
            f"mosquitto_passwd {passwords} NAME   # once per device, NAME as in --device NAME\n"
            f"chown mosquitto: {passwords}   # if root starts it: it then runs as that user"
        )
