"""Reads from mosquitto's log what the broker refused, by device or address, and counts it.

mosquitto names a device in the lines of an accepted connection. A connection that fails before has no name.
Then the refusal is filed under the address; if several connections were being opened at that moment, under
all of their addresses, because mosquitto's line has none.
"""

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from fleetune.coordinator.broker.access_rules import may_read, may_write
from fleetune.coordinator.rate_limiter import TokenBuckets

MAX_KINDS = 200  # of refusals between two reports
MAX_BLOCK_BYTES = 2**20
# What a device sends to itself, to measure the link. The broker stores what it does not read.
PROBE_BURST_BYTES, PROBE_BYTES_A_SECOND = 16 * 2**20, 2**20
PAUSE_S = 0.05  # between two reads, so that many small messages wake the reader 20 times a second only
_OPENING_S = 30.0  # the longest time from a connection to its acceptance or refusal

_TIME = re.compile(rb"^\d+: ")
# Most lines are about messages that pass. One expression finds the others.
_PROBE = r"Received PUBLISH from [^ ]+ \(.*/probe', \.\.\. \(\d{4,} bytes\)\)"  # of a kilobyte or more
_OF_PROBE = re.compile(rf"(?:\d+: )?{_PROBE}".encode())
_CHATTER = re.compile(rf"(?:\d+: )?(?:Sending |(?!{_PROBE})Received (?!SUBSCRIBE)|No will )".encode())
_DEVICE = r"(?P<device>[A-Za-z0-9_-]{1,64}(?:~probe)?)"
_AT = r"(?: \[\S+\])?"  # newer versions name the address
_ERROR = r"error:\w+:[^:]*:[^:]*:(?P<why>.*?)\.?"
_OPENED = re.compile(r"New connection from (?P<address>\S+):\d+ on port (?P<port>\d+)\.")
_ACCEPTED = re.compile(rf"New client connected from (?P<address>\S+):\d+ as {_DEVICE} \(.*u'(?P=device)'\)\.")
_FAILED = re.compile(rf"Client connection from (?P<address>\S+) failed: {_ERROR}")
_TLS_ERROR = re.compile(rf"OpenSSL Error\[0\]: {_ERROR}")
_CLOSED = re.compile(rf"Client <unknown>{_AT} disconnected(?::| due to) [Pp]rotocol error\.")
_LOGIN = re.compile(rf"Client \S+{_AT} disconnected, not authorised\.")
_TO_ITSELF = re.compile(rf"Received PUBLISH from {_DEVICE} \(.*?/probe', \.\.\. \((?P<bytes>\d+) bytes\)\)")
_OF_DEVICE = {
    re.compile(rf"Denied PUBLISH from {_DEVICE} \(.*?, '(?P<topic>.*)', \.\.\. \(\d+ bytes\)\)"): (
        "it may not publish to {topic}"
    ),
    re.compile(rf"Dropped too large PUBLISH from {_DEVICE} \(.*\((?P<bytes>\d+) bytes\)\)"): (
        "a message of {bytes} bytes is too large"
    ),
    re.compile(rf"Client {_DEVICE}{_AT} disconnected(?::| due to) (?P<why>.*)\."): "disconnected, {why}",
}
_SUBSCRIBES = re.compile(rf"Received SUBSCRIBE from {_DEVICE}$")
_WILL = re.compile(r"Will message specified ")
_TOPIC = re.compile(r"\t(?P<topic>.*?)(?: \(QoS \d\))?$")
_WORDS = {  # for OpenSSL's
    "certificate verify failed": "its certificate is expired, revoked, or not of this fleet",
    "peer did not return a certificate": "it has no certificate; it has not joined this fleet",
    "tlsv1 alert unknown ca": "it does not trust this fleet's authority; it must join again",
}
_NO_REFUSAL = ("unexpected eof while reading",)  # the peer went away


@dataclass(frozen=True)
class Refused:
    """Something that the broker refused.

    Attributes:
        who: a device's id, or an address.
        what: the reason, as the end of a sentence.
        is_device: True if `who` is a device that the broker has identified.
    """

    who: str
    what: str
    is_device: bool = False

    @property
    def device(self) -> str:
        """The device's id; "" if the broker has not identified it."""
        return self.who.partition("~")[0] if self.is_device else ""

    def __str__(self) -> str:
        return f"the broker refused {self.who}: {self.what}"


@dataclass(frozen=True)
class Accepted:
    """A device connected with this client id."""

    client_id: str


@dataclass(frozen=True)
class Flooding:
    """A device sends itself more than it needs to measure the link."""

    client_id: str


@dataclass
class LogParser:
    """Finds refused and accepted devices in the lines of mosquitto's log.

    Attributes:
        fleet: name of the fleet.
        ports: ports of the devices' listeners.
        clock: a monotonic clock, in seconds.
    """

    fleet: str
    ports: Collection[int]
    clock: Callable[[], float] = time.monotonic
    _opening: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=1000))
    _tls_error: str = ""
    _subject: tuple[str, bool] | None = None  # the device whose topics follow, and True for its last will
    _accepted: str = ""
    _to_itself: TokenBuckets = field(
        default_factory=lambda: TokenBuckets(PROBE_BURST_BYTES, PROBE_BYTES_A_SECOND)
    )

    def read(self, line: bytes) -> Refused | Accepted | Flooding | None:
        """Read one line without its end; return what the broker refused or accepted."""
        text = _TIME.sub(b"", line, count=1).decode("utf-8", "replace")
        if text.startswith("\t"):
            return self._topic(text)
        if found := _TO_ITSELF.fullmatch(text):
            bucket = self._to_itself.of(found["device"])
            return None if bucket.take(self.clock(), int(found["bytes"])) else Flooding(found["device"])
        self._subject = None
        if found := _OPENED.fullmatch(text):
            if int(found["port"]) in self.ports:
                self._opening.append((self.clock(), found["address"]))
        elif found := _ACCEPTED.fullmatch(text):
            self._accepted = found["device"]
            self._forget(found["address"])
            return Accepted(self._accepted)
        elif _WILL.match(text):
            self._subject = self._accepted, True
        elif found := _SUBSCRIBES.fullmatch(text):
            self._subject = found["device"], False
        elif found := _TLS_ERROR.fullmatch(text):
            self._tls_error = found["why"]
        else:
            return self._refused(text)
        return None

    def _refused(self, text: str) -> Refused | None:
        if found := _FAILED.fullmatch(text):
            return _of_tls(found["address"], found["why"])
        if _CLOSED.fullmatch(text):
            why, self._tls_error = self._tls_error, ""
            return _of_tls(self._opener(), why)
        if _LOGIN.fullmatch(text):
            return Refused(self._opener(), "user name and secret do not belong to a device of this fleet")
        for pattern, what in _OF_DEVICE.items():
            if found := pattern.fullmatch(text):
                return Refused(found["device"], what.format_map(found.groupdict()), is_device=True)
        return None

    def _topic(self, text: str) -> Refused | None:
        found = _TOPIC.fullmatch(text)
        if self._subject is None or found is None:
            return None
        (device, is_will), topic = self._subject, found["topic"]
        may = may_write if is_will else may_read
        if not device or may(self.fleet, device, topic):
            return None
        verb = "leave a last will on" if is_will else "read"
        return Refused(device, f"it may not {verb} {topic}", is_device=True)

    def _opener(self) -> str:
        """The address of the connection that failed. Its line names none."""
        now = self.clock()
        while self._opening and now - self._opening[0][0] > _OPENING_S:
            self._opening.popleft()
        found = sorted({address for _, address in self._opening})
        if self._opening:
            self._opening.popleft()
        return " or ".join(found[:3]) + (" or others" if found[3:] else "") or "an unknown address"

    def _forget(self, address: str) -> None:
        for one in self._opening:
            if one[1] == address:
                self._opening.remove(one)
                return


def _of_tls(address: str, why: str) -> Refused | None:
    if why in _NO_REFUSAL:
        return None
    return Refused(address, _WORDS.get(why, why) or "it does not speak MQTT")


class BrokerNews:
    """Refusals and accepted connections since the last call that took them; several threads use it."""

    def __init__(self) -> None:
        self._refused: dict[Refused, int] = {}
        self._accepted: set[str] = set()
        self._flooding: set[str] = set()
        self._lock = threading.Lock()

    def add(self, news: Refused | Accepted | Flooding) -> None:
        """Note an event. Beyond 200 kinds, all other refusals count as one."""
        with self._lock:
            if isinstance(news, Accepted):
                self._accepted.add(news.client_id)
                return
            if isinstance(news, Flooding):
                self._flooding.add(news.client_id)
                news = Refused(news.client_id, "it sends too much to its own topic probe", is_device=True)
            if news not in self._refused and len(self._refused) >= MAX_KINDS:
                news = Refused("other devices or addresses", "too many refusals to list them")
            self._refused[news] = self._refused.get(news, 0) + 1

    def take_refused(self) -> dict[Refused, int]:
        """Return the refusals with the number of times, and start anew."""
        with self._lock:
            taken, self._refused = self._refused, {}
        return taken

    def take_accepted(self) -> set[str]:
        """Return the client ids that connected, and start anew."""
        with self._lock:
            taken, self._accepted = self._accepted, set()
        return taken

    def take_flooding(self) -> set[str]:
        """Return the client ids that send too much to themselves, and start anew."""
        with self._lock:
            taken, self._flooding = self._flooding, set()
        return taken


def follow(pipe: int, parser: LogParser, news: BrokerNews, keep: Callable[[bytes], None]) -> None:
    """Read mosquitto's log from a pipe until its end.

    Args:
        pipe: file descriptor of the pipe; it is closed at the end.
        parser: reads the lines.
        news: gets what it finds.
        keep: called with each line that is not about a message that passes.
    """
    rest = b""
    with os.fdopen(pipe, "rb", buffering=0) as log:
        while block := log.read(MAX_BLOCK_BYTES):
            *lines, rest = (rest + block).split(b"\n")
            rest = rest[:MAX_BLOCK_BYTES]
            for line in lines:
                if not _CHATTER.match(line):
                    if not _OF_PROBE.match(line):
                        keep(line)
                    if (found := parser.read(line)) is not None:
                        news.add(found)
            time.sleep(PAUSE_S)
