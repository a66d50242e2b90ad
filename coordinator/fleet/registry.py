"""The devices of a fleet and its invitations, in one SQLite file.

Several processes open it: a coordinator, the server of the join exchange, and commands. It holds no secret:
of codes and keys it has the SHA-256, of secrets a salted hash.
"""

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Literal, Self

import msgspec
from msgspec import Struct

from fleetune.protocols.errors import SettingError, StoreError
from fleetune.protocols.files import make_folder, make_private_file
from fleetune.protocols.one_line import suggestion
from fleetune.protocols.table_format import TableFormat
from fleetune.protocols.wire.identity import check_display_name

BUSY_S = 5.0
Kind = Literal["certificate", "secret"]
State = Literal["pending", "accepted", "revoked"]

FORMAT = TableFormat(
    first=1,
    tables="""
CREATE TABLE device (
    id TEXT PRIMARY KEY, name TEXT NOT NULL, renamed INTEGER NOT NULL DEFAULT 0, kind TEXT NOT NULL,
    state TEXT NOT NULL, tags TEXT NOT NULL, key TEXT NOT NULL UNIQUE, secret TEXT NOT NULL DEFAULT '',
    ends_at REAL, authority TEXT NOT NULL DEFAULT '', bundle TEXT NOT NULL DEFAULT '',
    joined_at REAL NOT NULL, last_seen REAL, agent TEXT NOT NULL DEFAULT ''
);
CREATE INDEX device_name ON device (name);
CREATE TABLE issued (device TEXT PRIMARY KEY, certificate TEXT NOT NULL, probe_certificate TEXT NOT NULL);
CREATE TABLE serial (serial TEXT PRIMARY KEY, device TEXT, ends_at REAL NOT NULL);
CREATE INDEX serial_device ON serial (device);
CREATE TABLE invitation (
    id TEXT PRIMARY KEY, code TEXT NOT NULL UNIQUE, devices INTEGER NOT NULL, uses_left INTEGER NOT NULL,
    made_at REAL NOT NULL, expires_at REAL NOT NULL, tags TEXT NOT NULL, approve INTEGER NOT NULL,
    withdrawn INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE joining (
    invitation TEXT NOT NULL, key TEXT NOT NULL, device TEXT NOT NULL, at REAL NOT NULL,
    PRIMARY KEY (invitation, key)
) WITHOUT ROWID;
CREATE TABLE counter (version INTEGER NOT NULL);
INSERT INTO counter VALUES (1);
""",
)


class RegisteredDevice(Struct, frozen=True):
    """A device of the registry.

    Attributes:
        id: its id, which is the user name at the broker and part of its topics.
        name: its name for people.
        renamed: True if an operator chose the name; the agent's name is then ignored.
        kind: what the device proves its identity with.
        state: "pending" waits for an operator's approval; "revoked" may not connect.
        tags: an operator's words for it, from its invitation.
        key: SHA-256 of its public key, or of the nonce of a device with a secret, in hexadecimal.
        secret: the salted hash of its secret, in mosquitto's format; "" with a certificate.
        ends_at: when its certificates or its secret end, in seconds since 1970; None before it has any.
        authority: fingerprint of the authority that signed its certificates; "" without.
        bundle: `Authority.bundle_id` of the certificates that the device trusts; "" if not known.
        joined_at, last_seen: seconds since 1970.
        agent: program and version.
    """

    id: str
    name: str
    renamed: bool
    kind: Kind
    state: State
    tags: tuple[str, ...]
    key: str
    secret: str
    ends_at: float | None
    authority: str
    bundle: str
    joined_at: float
    last_seen: float | None
    agent: str

    def __str__(self) -> str:
        """Return the name, followed by the id if they differ."""
        return self.id if self.name == self.id else f"{self.name} ({self.id})"

    def shut_out(self, now: float) -> str:
        """Return why the device may not connect at `now` (seconds since 1970); "" if it may."""
        if self.state != "accepted":
            return "revoked" if self.state == "revoked" else "waits for approval"
        return "must join again" if self.ends_at is not None and self.ends_at <= now else ""


class StoredInvitation(Struct, frozen=True):
    """An invitation of the registry.

    Attributes:
        id: a short name of it, which is no secret.
        code: SHA-256 of its code, in hexadecimal.
        devices: number of devices that may join with it.
        uses_left: number of devices that may still join with it.
        made_at, expires_at: seconds since 1970.
        tags: tags of the devices that join with it.
        approve: True if an operator must approve each device.
        withdrawn: True if no more devices may join with it.
    """

    id: str
    code: str
    devices: int
    uses_left: int
    made_at: float
    expires_at: float
    tags: tuple[str, ...] = ()
    approve: bool = False
    withdrawn: bool = False

    def is_open(self, now: float) -> bool:
        """True if another device may join with it."""
        return self.uses_left > 0 and not self.withdrawn and now < self.expires_at


_DEVICE = ", ".join(RegisteredDevice.__struct_fields__)
_INVITATION = ", ".join(StoredInvitation.__struct_fields__)


class Registry:
    """The registry of a fleet, for one thread; each thread opens its own.

    All methods raise StoreError if the file cannot be read or written.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self.path = path

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open the file, or create it.

        Raises:
            StoreVersion: this program cannot read its format.
            StoreError: it cannot be opened, or is no registry.
        """
        make_folder(path.parent)
        with ExitStack() as opened, _errors(path):
            make_private_file(path)  # SQLite gives its other files the same permissions
            connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=BUSY_S)
            opened.callback(connection.close)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")  # a joining is durable before its answer
            FORMAT.bring_up(connection, path)
            opened.pop_all()
        return cls(connection, path)

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def version(self) -> int:
        """A number that grows with each change of any process, except those of `note_seen`."""
        return int(self._rows("SELECT version FROM counter")[0][0])

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run a transaction: all changes in this context are stored, or none.

        Other processes cannot write meanwhile. A step within another belongs to it.
        """
        if self._connection.in_transaction:
            yield
            return
        with _errors(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")

    def device(self, device: str) -> RegisteredDevice | None:
        return next(iter(self._devices("WHERE id = ?", device)), None)

    def device_with_key(self, key: str) -> RegisteredDevice | None:
        return next(iter(self._devices("WHERE key = ?", key)), None)

    def devices(self) -> list[RegisteredDevice]:
        """Return all devices, ordered by id."""
        return self._devices("ORDER BY id")

    def find(self, name: str) -> RegisteredDevice:
        """Return the device of an id, or of a name that only one device has.

        Raises:
            SettingError: there is none, or several could be meant. An id counts before a name that another
                device has given itself, but not before one that an operator has given.
        """
        found = self._devices("WHERE id = ?", name) or self._devices("WHERE name = ? ORDER BY id", name)
        if len(found) > 1:
            ids = ", ".join(one.id for one in found[:10])
            raise SettingError(f"several devices are called {name!r}; use an id: {ids}")
        if not found:
            command = "SELECT id FROM device UNION SELECT name FROM device LIMIT 500"
            known = [row[0] for row in self._rows(command)]
            advice = suggestion(name, known) if known else "no device has joined yet"
            raise SettingError(f"no device {name!r} in fleet {self.path.parent.name}; {advice}")
        for other in self._devices("WHERE name = ? AND id != ? AND renamed", name, found[0].id):
            raise SettingError(
                f"{name!r} is the name of device {other.id}, and the id of another; rename {other.id} first"
            )
        return found[0]

    def is_known(self, name: str) -> bool:
        """True if a device has this id or name, so that a new device may not have it as its id."""
        command = "SELECT 1 FROM device WHERE id = ? UNION SELECT 1 FROM device WHERE name = ?"
        return bool(self._rows(command, name, name))

    def put(self, device: RegisteredDevice) -> None:
        """Add a device, or replace it."""
        self._put("device", "id", **(msgspec.structs.asdict(device) | {"tags": _text(device.tags)}))

    def accept(self, device: str) -> None:
        """Let a device connect: a pending one, or one that was revoked."""
        self._set(device, state="accepted")

    def revoke(self, device: str) -> list[str]:
        """Let a device no longer connect; `accept` undoes it.

        Returns:
            The ids of its invitations that were open to more devices. They are withdrawn, because the device
            could join with them as another one.
        """
        where = "withdrawn = 0 AND uses_left > 0 AND id IN (SELECT invitation FROM joining WHERE device = ?)"
        with self.step():
            self._set(device, state="revoked")
            closed = [one.id for one in self._invitations(f"WHERE {where} ORDER BY id", device)]
            self._change(f"UPDATE invitation SET withdrawn = 1 WHERE {where}", device)  # noqa: S608
        return closed

    def end_all(self, now: float) -> None:
        """End the certificates and secrets of all devices at `now` (seconds since 1970)."""
        self._change("UPDATE device SET ends_at = ? WHERE ends_at > ?", now, now)

    def rename(self, device: str, name: str) -> None:
        """Set a device's name for people. Raises SettingError."""
        name = check_display_name(name, "the name")
        with self.step():
            if name != device and self.device(name) is not None:
                raise SettingError(f"another device has the id {name!r}; choose another name")
            self._set(device, name=name, renamed=1)

    def forget(self, device: str) -> None:
        """Remove a device and all that is known of it. Its certificates stay revoked, without its name."""
        with self.step():
            for command in (
                "DELETE FROM device WHERE id = ?",
                "DELETE FROM issued WHERE device = ?",
                "DELETE FROM joining WHERE device = ?",
                "UPDATE serial SET device = NULL WHERE device = ?",
            ):
                self._change(command, device)

    def compact(self) -> None:
        """Write the file anew, so that it holds nothing of forgotten devices."""
        with _errors(self.path):
            self._connection.execute("VACUUM")
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def note_certificates(
        self,
        device: str,
        certificates: tuple[str, str],
        serials: Iterable[str],
        *,
        ends_at: float,
        authority: str,
    ) -> None:
        """Store the certificates that were made for a device: its own and that of its second connection."""
        own, probe = certificates
        with self.step():
            self._put("issued", "device", device=device, certificate=own, probe_certificate=probe)
            for serial in serials:
                self._put("serial", "serial", serial=serial, device=device, ends_at=ends_at)
            self._set(device, ends_at=ends_at, authority=authority)

    def certificates(self, device: str) -> tuple[str, str] | None:
        """Return the newest certificates in PEM that were made for a device."""
        rows = self._rows("SELECT certificate, probe_certificate FROM issued WHERE device = ?", device)
        return (rows[0][0], rows[0][1]) if rows else None

    def note_secret(self, device: str, hashed: str, *, ends_at: float) -> None:
        """Store the salted hash of a device's new secret, and when it ends."""
        self._set(device, secret=hashed, ends_at=ends_at)

    def note_bundle(self, device: str, bundle: str) -> None:
        """Store which certificates a device trusts (`Authority.bundle_id`)."""
        self._set(device, bundle=bundle)

    def note_seen(self, seen: Mapping[str, tuple[float, str, str]]) -> None:
        """Store when devices were connected last (seconds since 1970), their agents, and their own names."""
        command = (
            "UPDATE device SET last_seen = ?, agent = ?, name = CASE renamed WHEN 0 THEN ? ELSE name END"
            " WHERE id = ?"
        )
        rows = [(at, agent, name or device, device) for device, (at, agent, name) in seen.items()]
        with self.step():
            self._connection.executemany(command, rows)

    def revoked_serials(self, now: float) -> list[str]:
        """Return the serial numbers of revoked and forgotten devices' certificates that have not ended."""
        command = (
            "SELECT serial FROM serial LEFT JOIN device ON device.id = serial.device WHERE serial.ends_at > ?"
            " AND (device.id IS NULL OR device.state = 'revoked') ORDER BY serial"
        )
        return [row[0] for row in self._rows(command, now)]

    def secrets(self, now: float) -> list[tuple[str, str]]:
        """Return the ids of the accepted devices with a secret that has not ended, and its hash."""
        command = (
            "SELECT id, secret FROM device WHERE state = 'accepted' AND secret != '' AND ends_at > ?"
            " ORDER BY id"
        )
        return [(row[0], row[1]) for row in self._rows(command, now)]

    def invitation(self, code: str) -> StoredInvitation | None:
        """Return the invitation with a code, given as SHA-256."""
        return next(iter(self._invitations("WHERE code = ?", code)), None)

    def invitations(self) -> list[StoredInvitation]:
        """Return all invitations, newest first."""
        return self._invitations("ORDER BY made_at DESC, id")

    def put_invitation(self, invitation: StoredInvitation) -> None:
        """Add an invitation, or replace it."""
        values = msgspec.structs.asdict(invitation) | {"tags": _text(invitation.tags)}
        self._put("invitation", "id", **values)

    def drop_invitations(self, ended_before: float) -> None:
        """Remove invitations that ended before a time, in seconds since 1970."""
        with self.step():
            self._change("DELETE FROM invitation WHERE expires_at < ?", ended_before)
            self._change("DELETE FROM joining WHERE invitation NOT IN (SELECT id FROM invitation)")

    def joined_with(self, invitation: str, key: str) -> str | None:
        """Return the id of the device that used an invitation with a key."""
        command = "SELECT device FROM joining WHERE invitation = ? AND key = ?"
        rows = self._rows(command, invitation, key)
        return rows[0][0] if rows else None

    def devices_of(self, invitation: str) -> list[str]:
        """Return the ids of the devices that joined with an invitation, oldest first."""
        command = "SELECT device FROM joining WHERE invitation = ? ORDER BY at, device"
        return [row[0] for row in self._rows(command, invitation)]

    def note_joining(self, invitation: str, key: str, device: str, now: float) -> None:
        """Take one use of an invitation."""
        with self.step():
            self._put("joining", "invitation, key", invitation=invitation, key=key, device=device, at=now)
            self._change("UPDATE invitation SET uses_left = uses_left - 1 WHERE id = ?", invitation)

    def _devices(self, rest: str, *values: object) -> list[RegisteredDevice]:
        rows = self._rows(f"SELECT {_DEVICE} FROM device {rest}", *values)  # noqa: S608 - our own names
        return [_read(row, RegisteredDevice) for row in rows]

    def _invitations(self, rest: str, *values: object) -> list[StoredInvitation]:
        rows = self._rows(f"SELECT {_INVITATION} FROM invitation {rest}", *values)  # noqa: S608 - our own names
        return [_read(row, StoredInvitation) for row in rows]

    def _set(self, device: str, **values: object) -> None:
        assignments = ", ".join(f"{name} = ?" for name in values)
        self._change(f"UPDATE device SET {assignments} WHERE id = ?", *values.values(), device)  # noqa: S608

    def _put(self, table: str, primary: str, /, **values: object) -> None:
        """Add a row, or replace the row with the same primary key."""
        names, marks = ", ".join(values), ", ".join("?" * len(values))
        changes = ", ".join(f"{name} = excluded.{name}" for name in values)
        command = f"INSERT INTO {table} ({names}) VALUES ({marks})"  # noqa: S608 - our own names
        command += f" ON CONFLICT ({primary}) DO UPDATE SET {changes}"
        self._change(command, *values.values())

    def _change(self, command: str, *values: object) -> None:
        with self.step(), _errors(self.path):
            self._connection.execute(command, values)
            self._connection.execute("UPDATE counter SET version = version + 1")

    def _rows(self, command: str, *values: object) -> list[Sequence[Any]]:
        with _errors(self.path), closing(self._connection.execute(command, values)) as cursor:
            return cursor.fetchall()


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, sqlite3.Error) as problem:
        raise StoreError(f"cannot use {path}: {problem}") from None


def _read(row: Sequence[Any], kind: Any) -> Any:
    values = dict(zip(kind.__struct_fields__, row, strict=True))
    values["tags"] = msgspec.json.decode(values["tags"])
    return msgspec.convert(values, kind, strict=False)


def _text(tags: Sequence[str]) -> str:
    return msgspec.json.encode(tags).decode()
