"""The embedded broker: an MQTT broker on this machine as a child process, mosquitto if installed, else amqtt.

By default only this machine can connect. The broker stores nothing across restarts, because agents and
coordinator repeat every message that matters.

The broker ends with this process, even if this process is killed. On Linux the kernel kills the broker when
the thread that started it ends, so start it from a thread that lives as long as the broker.
"""

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Self

from fleetune.coordinator.broker.access_rules import mosquitto_rules
from fleetune.coordinator.broker.credentials import Credentials
from fleetune.coordinator.tied_child import tied
from fleetune.protocols.disk import open_private
from fleetune.protocols.errors import TransportError
from fleetune.protocols.files import make_folder, write_atomically
from fleetune.protocols.wire.pacing import MAX_CHUNK_BYTES
from fleetune.protocols.wire.transport.mqtt import in_url

Which = Literal["auto", "mosquitto", "amqtt"]
START_S = 20.0
STOP_S = 5.0
MAX_MESSAGE_BYTES = MAX_CHUNK_BYTES + 65_536
MAX_QUEUED_MESSAGES = 50_000  # waiting for one client that does not read
MAX_QUEUED_BYTES = 512 * 2**20
LIMITS = (  # of mosquitto
    "set_tcp_nodelay true",
    # A chunk is the largest message that we send, and our windows bound the bytes in flight. More is a flood.
    # Messages that an honest transfer loses are sent again.
    f"message_size_limit {MAX_MESSAGE_BYTES}",
    f"max_queued_messages {MAX_QUEUED_MESSAGES}",
    f"max_queued_bytes {MAX_QUEUED_BYTES}",
)
MAX_LOG_BYTES = 5 * 2**20
AMQTT_PATIENCE_S = 5  # added to the keepalive; amqtt has no grace of its own

# where root creates a folder for another user
_SHARED = next(place for place in (Path("/run"), Path(tempfile.gettempdir())) if place.is_dir())
_LOCAL = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - compared, not bound
_OURS = os.pathsep.join(filter(None, [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH")]))

# Debian installs mosquitto outside an ordinary user's PATH.
_SEARCH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"])


@dataclass(frozen=True)
class Access:
    """Restricts the broker to the devices of one fleet and its coordinator (see `access_rules`).

    Attributes:
        fleet: name of the fleet.
        credentials: the fleet's passwords.
    """

    fleet: str
    credentials: Credentials

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write the password file and mosquitto's rules, readable by this user only, and return both paths.

        Raises:
            StoreError: a file cannot be written.
        """
        passwords, rules = folder / "passwords", folder / "rules"
        write_atomically(passwords, self.credentials.password_file().encode(), mode=0o600)
        write_atomically(rules, mosquitto_rules(self.fleet).encode(), mode=0o600)
        return passwords, rules


@dataclass(frozen=True)
class _Listener:
    bind: str
    port: int
    access: Access | None
    cert: Path | None
    key: Path | None


class EmbeddedBroker:
    """A running embedded broker. `close`, or the end of a `with` block, stops it.

    Attributes:
        which: "mosquitto" or "amqtt".
        host, port: address for clients on this machine.
        log: the broker's log file.
        pid: the broker's process id.
    """

    def __init__(
        self,
        which: str,
        bind: str,
        port: int,
        process: "subprocess.Popen[bytes]",
        log: Path,
        place: Path | None,
    ) -> None:
        self.which = which
        self.host = _LOCAL.get(bind, bind)
        self.port = port
        self.log = log
        self.pid = process.pid
        self._process = process
        self._place = place

    @staticmethod
    def check(bind: str, port: int) -> None:
        """Check that a broker could start now at this address and port.

        Raises:
            TransportError: no broker is installed, or the port is in use.
        """
        _choose("auto")
        claim_port(bind, port)

    @classmethod
    def start(
        cls,
        folder: Path,
        *,
        port: int = 0,
        bind: str = "127.0.0.1",
        which: Which = "auto",
        access: Access | None = None,
        cert: Path | None = None,
        key: Path | None = None,
        timeout_s: float = START_S,
    ) -> Self:
        """Start a broker, and return it when it accepts connections.

        Args:
            folder: folder for the broker's configuration and log.
            port: port to listen on; 0 selects a free one.
            bind: address to listen on. 0.0.0.0 lets other machines connect, `::` also by IPv6; then give
                `access`.
            which: "auto" selects mosquitto if it is installed, else amqtt.
            access: passwords and rules of a fleet; None lets every client use every topic.
            cert: PEM file of the broker's certificate; with `cert` and `key` the broker accepts TLS only.
            key: PEM file of the certificate's key.
            timeout_s: seconds within which the broker must accept connections.

        Raises:
            TransportError: no broker is installed, or it does not start; the message has the log's last
                lines.
        """
        if (cert is None) != (key is None):
            raise TransportError(
                "TLS of the embedded broker needs a certificate and its key: give both --cert and --key"
            )
        kind = _choose(which)
        port = claim_port(bind, port)
        make_folder(folder)
        settings = _Listener(bind, port, access, cert, key)
        user = mosquitto_user() if kind == "mosquitto" else ""
        place = _readable_by(user, folder) if user else None
        if kind == "mosquitto":
            command = _mosquitto(place or folder, settings, user)
        else:
            command = _amqtt(folder, settings)
        log = _fresh_log(folder / f"{kind}.log")
        with open_private(log) as output:
            process = subprocess.Popen(  # noqa: S603 - our own command line
                tied(command, signal.SIGKILL, user),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": _OURS},  # amqtt loads our plugins
                process_group=0,  # Ctrl-C in a terminal must not end it before its coordinator has finished.
            )
        broker = cls(kind, bind, port, process, log, place)
        broker._wait_until_listening(timeout_s)
        return broker

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def wait(self) -> int:
        """Wait until the broker ends, and return its exit code (negative: the number of the signal that ended
        it).
        """
        return self._process.wait()

    def close(self) -> None:
        """Stop the broker; do nothing if it has already stopped."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        self.kill()

    def kill(self) -> None:
        """Kill the broker without notifying its clients."""
        self._process.kill()
        self._process.wait()
        if self._place is not None:
            shutil.rmtree(self._place, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait_until_listening(self, timeout_s: float) -> None:
        give_up_at = time.monotonic() + timeout_s
        while self.running and time.monotonic() < give_up_at:
            try:
                socket.create_connection((self.host, self.port), timeout=1).close()
            except OSError:
                time.sleep(0.05)
            else:
                return
        problem = "does not listen" if self.running else "stopped"
        self.close()
        raise TransportError(
            f"{self.which} {problem} at {in_url(self.host)}:{self.port}: {_last_words(self.log)};"
            f" more in {self.log}"
        )


def claim_port(bind: str, port: int) -> int:
    """Check that no program listens on `port`, and return it; 0 returns a free port.

    Otherwise, another program's answer could be mistaken for the broker's.

    Raises:
        TransportError: the port is in use, or this machine has no such address.
    """
    try:
        family = socket.getaddrinfo(bind or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][
            0
        ]
        both = bind == "::" and socket.has_dualstack_ipv6()
        with socket.create_server((bind, port), family=family, dualstack_ipv6=both) as server:
            return int(server.getsockname()[1])
    except OSError as problem:
        raise TransportError(
            f"no broker can listen on {in_url(bind)}:{port}: {problem.strerror}; stop the program that uses"
            " the port, or"
            " choose another port or an address of this machine"
        ) from None


def _named(bind: str) -> str:
    """Return the address for mosquitto's `listener` line; "" listens on all IPv4 and IPv6 addresses.

    In mosquitto, `::` alone means IPv6 only.
    """
    return "" if bind == "::" else bind


def _choose(which: Which) -> str:
    have = {
        "mosquitto": shutil.which("mosquitto", path=_SEARCH) is not None,
        "amqtt": find_spec("amqtt") is not None,
    }
    for kind in have if which == "auto" else [which]:
        if have[kind]:
            return kind
    raise TransportError(
        f"no MQTT broker is installed ({which}): install mosquitto, or pip install 'amqtt>=0.12,<0.13'"
    )


def mosquitto_user() -> str:
    """Return the user as whom mosquitto runs if this process is root; "" if it is not root."""
    if os.geteuid() != 0:
        return ""
    import pwd

    return next((one.pw_name for one in pwd.getpwall() if one.pw_name == "mosquitto"), "nobody")


def _readable_by(user: str, folder: Path) -> Path:
    """Create an empty folder that only `user` can read, and return it. The path is the same at each start.

    Mosquitto's user cannot read the run's folder, which belongs to root.

    Raises:
        TransportError: the folder cannot be created.
    """
    name = hashlib.sha256(os.fsencode(folder.absolute())).hexdigest()[:16]
    place = _SHARED / f"fleetune-broker-{name}"
    try:
        if place.exists():  # left by a coordinator that was killed
            shutil.rmtree(place)
        place.mkdir(0o700)
        shutil.chown(place, user)
    except OSError as problem:
        raise TransportError(f"cannot create {place} for mosquitto's files: {problem.strerror}") from None
    return place


def _mosquitto(folder: Path, listener: _Listener, user: str) -> list[str]:
    """Write mosquitto's files and return its start command. `user` can read the files again after SIGHUP."""
    lines = [
        f"listener {listener.port} {_named(listener.bind)}".rstrip(),
        "persistence false",
        *LIMITS,
        "log_type error",
        "log_type warning",
        f"allow_anonymous {'false' if listener.access else 'true'}",
    ]
    if listener.access:
        passwords, rules = listener.access.write(folder)
        lines += [f"password_file {passwords.absolute()}", f"acl_file {rules.absolute()}"]
    for option, file in (("certfile", listener.cert), ("keyfile", listener.key)):
        if file is not None:
            lines.append(f"{option} {_copied(file, folder / option) if user else file}")
    path = folder / "mosquitto.conf"
    write_atomically(path, ("\n".join(lines) + "\n").encode())
    return [str(shutil.which("mosquitto", path=_SEARCH)), "-c", str(path)]


def _copied(file: Path, to: Path) -> Path:
    """Copy a PEM file so that only the folder's owner can read it. Raises TransportError."""
    try:
        write_atomically(to, file.read_bytes())
    except OSError as problem:
        raise TransportError(f"cannot read {file}: {problem.strerror}") from None
    return to


def _amqtt(folder: Path, listener: _Listener) -> list[str]:
    plugins: dict[str, dict[str, object]] = {"fleetune.coordinator.broker.amqtt_access.OneConnection": {}}
    if listener.access:
        passwords, _ = listener.access.write(folder)
        fleet = listener.access.fleet
        own: dict[str, object] = {"fleet": fleet, "password_file": str(passwords.absolute())}
        plugins["fleetune.coordinator.broker.amqtt_access.FleetPasswords"] = own
        plugins["fleetune.coordinator.broker.amqtt_access.FleetTopics"] = {"fleet": fleet}
    else:
        plugins["amqtt.plugins.authentication.AnonymousAuthPlugin"] = {"allow_anonymous": True}
    tls = {"ssl": True, "certfile": str(listener.cert), "keyfile": str(listener.key)} if listener.cert else {}
    settings = {
        "listeners": {"default": {"type": "tcp", "bind": f"{_named(listener.bind)}:{listener.port}", **tls}},
        "timeout_disconnect_delay": AMQTT_PATIENCE_S,
        "plugins": plugins,
    }
    path = folder / "amqtt.yaml"
    write_atomically(path, json.dumps(settings, indent=1).encode())  # JSON is YAML
    return [sys.executable, "-P", "-m", "amqtt.scripts.broker_script", "-c", str(path)]


def _fresh_log(path: Path) -> Path:
    """Return the path of the log to write. A large old log is renamed first."""
    if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
        path.replace(path.with_name(path.name + ".1"))
    return path


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    return " | ".join([line for line in lines if line][-3:]) or "it said nothing"
