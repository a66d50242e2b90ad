"""The embedded broker: an MQTT broker on this machine as a child process, mosquitto if installed, else amqtt.

By default only this machine can connect. With `FleetListeners`, the devices of a fleet connect from other
machines. The broker stores nothing across restarts, because agents and coordinator repeat every message that
matters.

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
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Literal, Self

from fleetune.coordinator.broker.broker_log import LogParser, follow
from fleetune.coordinator.broker.fleet_listeners import FleetListeners, named
from fleetune.coordinator.tied_child import most_open_files, tied
from fleetune.protocols.disk import open_private
from fleetune.protocols.errors import TransportError
from fleetune.protocols.files import make_folder, write_atomically
from fleetune.protocols.wire.pacing import MAX_CHUNK_BYTES
from fleetune.protocols.wire.transport.mqtt import in_url

if sys.platform != "win32":
    import fcntl

Which = Literal["auto", "mosquitto", "amqtt"]
START_S = 20.0
STOP_S = 5.0
MAX_MESSAGE_BYTES = MAX_CHUNK_BYTES + 65_536
# Waiting for one client that does not read. Ours have QoS 0; of these, mosquitto limits the number only.
MAX_QUEUED_MESSAGES = 20_000
MAX_QUEUED_BYTES = 4 * 2**20
MAX_UNACKNOWLEDGED = 4  # messages that are kept beside the queue
LIMITS = (  # of mosquitto
    "set_tcp_nodelay true",
    # A chunk is the largest message that we send, and our windows bound the bytes in flight. More is a flood.
    # Messages that an honest transfer loses are sent again.
    f"message_size_limit {MAX_MESSAGE_BYTES}",
    f"max_queued_messages {MAX_QUEUED_MESSAGES}",
    f"max_queued_bytes {MAX_QUEUED_BYTES}",
    f"max_inflight_messages {MAX_UNACKNOWLEDGED}",
    "persistent_client_expiration 1h",  # the shortest; of a session that outlives its connection
)
MAX_LOG_BYTES = 5 * 2**20
PIPE_BYTES = 2**20  # of log lines that wait for their reader
AMQTT_PATIENCE_S = 5  # added to the keepalive; amqtt has no grace of its own

# where root creates a folder for another user
_SHARED = next(place for place in (Path("/run"), Path(tempfile.gettempdir())) if place.is_dir())
_LOCAL = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - compared, not bound
_OURS = os.pathsep.join(filter(None, [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH")]))

# Debian installs mosquitto outside an ordinary user's PATH.
_SEARCH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"])


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
        fleet: FleetListeners | None,
        follower: threading.Thread | None,
    ) -> None:
        self.which = which
        self.host = _LOCAL.get(bind, bind)
        self.port = port
        self.log = log
        self.pid = process.pid
        self._process = process
        self._place = place
        self._fleet = fleet
        self._follower = follower

    @classmethod
    def start(
        cls,
        folder: Path,
        *,
        port: int = 0,
        bind: str = "127.0.0.1",
        which: Which = "auto",
        fleet: FleetListeners | None = None,
        timeout_s: float = START_S,
    ) -> Self:
        """Start a broker, and return it when it accepts connections.

        Args:
            folder: folder for the broker's configuration and log.
            port: port to listen on; 0 selects a free one.
            bind: address to listen on. Every client there may use every topic.
            which: "auto" selects mosquitto if it is installed, else amqtt.
            fleet: further listeners for the devices of a fleet. Only mosquitto has them. Then `bind` and
                `port` are the coordinator's, on the loopback.
            timeout_s: seconds within which the broker must accept connections.

        Raises:
            TransportError: no broker is installed, or it does not start; the message has the log's last
                lines.
        """
        kind = choose_broker(which if fleet is None else "mosquitto")
        port = claim_ports(bind, port)
        make_folder(folder)
        user = mosquitto_user() if kind == "mosquitto" else ""
        place = _readable_by(user, folder) if user else None
        if kind == "mosquitto":
            command = _mosquitto(place or folder, bind, port, fleet)
        else:
            command = _amqtt(folder, bind, port)
        log = folder / f"{kind}.log"
        with _output(log, fleet) as (output, follower):
            process = subprocess.Popen(  # noqa: S603 - our own command line
                tied(command, signal.SIGKILL, user, open_files=most_open_files()),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": _OURS},  # amqtt loads our plugin
                process_group=0,  # Ctrl-C in a terminal must not end it before its coordinator has finished.
            )
        broker = cls(kind, bind, port, process, log, place, fleet, follower)
        broker._wait_until_listening(timeout_s)
        return broker

    def reload(self) -> None:
        """Let the broker read the fleet's certificates, revocation list and passwords again.

        Raises:
            TransportError: a file cannot be read.
        """
        if self._fleet is not None and self.running:
            self._fleet.refresh(self._place or self.log.parent)
            self._process.send_signal(signal.SIGHUP)

    def end(self) -> None:
        """Let the broker end, and with it all connections."""
        self._process.terminate()

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
        if self._follower is not None:
            self._follower.join(STOP_S)
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


def claim_ports(bind: str, port: int, count: int = 1) -> int:
    """Check that no program listens on `port` and the ports after it, and return it.

    Otherwise, another program's answer could be mistaken for the broker's.

    Args:
        bind: address of this machine; "" for all.
        port: the first port; 0 selects free ones.
        count: number of ports.

    Raises:
        TransportError: a port is in use, or this machine has no such address.
    """
    first = port or _free_port(bind, count)
    for one in range(first, first + count):
        _listen(bind, one)
    return first


def _free_port(bind: str, count: int) -> int:
    """Return a free port after which the next ones are free too, as far as a few attempts find one."""
    for _ in range(20):
        first = _listen(bind, 0)
        with suppress(TransportError):
            for one in range(first + 1, first + count):
                _listen(bind, one)
            break
    return first


def _listen(bind: str, port: int) -> int:
    try:
        family = socket.getaddrinfo(bind or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][
            0
        ]
        both = bind == "::" and socket.has_dualstack_ipv6()
        with socket.create_server((bind, port), family=family, dualstack_ipv6=both) as server:
            return int(server.getsockname()[1])
    except (OSError, OverflowError) as problem:
        why = getattr(problem, "strerror", problem)
        raise TransportError(
            f"no broker can listen on {in_url(bind)}:{port}: {why}; stop the program that uses the port, or"
            " choose another port or an address of this machine"
        ) from None


def choose_broker(which: Which) -> str:
    """Return the kind of broker to start. Raises TransportError if it is not installed."""
    have = {
        "mosquitto": shutil.which("mosquitto", path=_SEARCH) is not None,
        "amqtt": find_spec("amqtt") is not None,
    }
    for kind in have if which == "auto" else [which]:
        if have[kind]:
            return kind
    if which == "mosquitto":
        raise TransportError(
            "mosquitto is not installed, and no other broker encrypts and checks certificates: apt install"
            " mosquitto; or name a broker of your own with --broker"
        )
    raise TransportError(
        f"no MQTT broker is installed ({which}): apt install mosquitto, or pip install 'amqtt>=0.12,<0.13'"
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


def _mosquitto(folder: Path, bind: str, port: int, fleet: FleetListeners | None) -> list[str]:
    """Write mosquitto's files into a folder that its user can read, and return its start command."""
    if fleet is None:
        lines = [f"listener {port} {named(bind)}".rstrip(), "allow_anonymous true"]
        types = ["error", "warning"]
    else:
        lines = fleet.settings(folder, port)
        types = ["error", "warning", "notice", "information", "debug"]  # refusals are in all of them
    lines += ["persistence false", *LIMITS, "log_dest stderr", *(f"log_type {one}" for one in types)]
    path = folder / "mosquitto.conf"
    write_atomically(path, ("\n".join(lines) + "\n").encode())
    return [str(shutil.which("mosquitto", path=_SEARCH)), "-c", str(path)]


def _amqtt(folder: Path, bind: str, port: int) -> list[str]:
    settings = {
        "listeners": {"default": {"type": "tcp", "bind": f"{named(bind)}:{port}"}},
        "timeout_disconnect_delay": AMQTT_PATIENCE_S,
        "plugins": {
            "fleetune.coordinator.broker.amqtt_plugin.OneConnection": {},
            "amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True},
        },
    }
    path = folder / "amqtt.yaml"
    write_atomically(path, json.dumps(settings, indent=1).encode())  # JSON is YAML
    return [sys.executable, "-P", "-m", "amqtt.scripts.broker_script", "-c", str(path)]


@contextmanager
def _output(log: Path, fleet: FleetListeners | None) -> Iterator[tuple[IO[bytes], threading.Thread | None]]:
    """Yield the file for the broker's output, and the thread that reads it if a fleet's refusals are read."""
    if fleet is None:
        with open_private(_fresh_log(log)) as output:
            yield output, None
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)  # the broker drops lines rather than wait for a reader that is behind
    if sys.platform == "linux":
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    follower = threading.Thread(target=_follow, args=(reading, fleet, log), name="broker's log", daemon=True)
    follower.start()
    with os.fdopen(writing, "wb") as output:
        yield output, follower


def _follow(reading: int, fleet: FleetListeners, log: Path) -> None:
    parser = LogParser(fleet.files.fleet, (fleet.port, fleet.port + 1))
    with closing(_RotatedLog(log)) as kept:
        follow(reading, parser, fleet.news, kept.write)


class _RotatedLog:
    """A log file that is renamed and begun anew when it is too long."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open_private(_fresh_log(path))

    def write(self, line: bytes) -> None:
        with suppress(OSError):  # the disk is full
            self._file.write(line + b"\n")
            self._file.flush()
            if self._file.tell() > MAX_LOG_BYTES:
                self._file.close()
                self._file = open_private(_fresh_log(self._path))

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()


def _fresh_log(path: Path) -> Path:
    """Return the path of the log to write. A large old log is renamed first."""
    if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
        path.replace(path.with_name(path.name + ".1"))
    return path


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    return " | ".join([line for line in lines if line][-3:]) or "it said nothing"
