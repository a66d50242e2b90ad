"""Joins a fleet with an invitation.

A command that is stopped at any moment, or gets no answer, can be repeated: it sends the same key again.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from fleetune.edge_agent.joining.exchange import ServerBusyError, authority_of, send
from fleetune.edge_agent.joining.joined_fleet import Certificates, Credentials, JoinedFleet, joined_fleet
from fleetune.edge_agent.joining.signing_request import KeyAndRequest, key_and_request
from fleetune.protocols.errors import SettingError, StoreError, TransportError
from fleetune.protocols.version import VERSION
from fleetune.protocols.wire.join_exchange import Joined, JoinLine, JoinPending, JoinRefused, JoinRequest
from fleetune.protocols.wire.messages import readable
from fleetune.protocols.wire.transport.tls import CLOCK_BEHIND

ATTEMPTS = 6  # at a busy server; about a minute in all
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0

Say = Callable[[str], None]
_T = TypeVar("_T")


def join(
    line: JoinLine,
    state: Path,
    *,
    device: str | None,
    name: str,
    say: Say,
    sleep: Callable[[float], None] = time.sleep,
) -> JoinedFleet:
    """Join a fleet, and wait for its operator's approval if the invitation asks for it.

    Args:
        line: the invitation.
        state: the folder of `--state`.
        device: the id that this device wants; None for the one that it has, or the coordinator's choice.
        name: the device's name for people.
        say: called with lines for the user.
        sleep: waits for some seconds.

    Raises:
        TransportError: the server cannot be reached, or is not the coordinator of this invitation.
        SettingError: the coordinator refuses this device; the line is its reason.
        StoreError: the key cannot be made, or a file cannot be written.
    """
    authority = _while_busy(lambda: authority_of(line), sleep)
    credentials, before = Credentials.of(state, line.fleet), None
    with suppress(StoreError):  # a damaged record, which this command replaces
        before = joined_fleet(state, line.fleet)
    wish = device or (before.device if before is not None else None)

    def request(made: KeyAndRequest) -> Joined:
        asked = JoinRequest(line.fleet, line.code, made.request, wish, name, f"fleetune {VERSION}")
        return _admitted(line, authority, asked, say, sleep)

    made, joined = _with_a_known_key(credentials, request)
    found = JoinedFleet(credentials, line.fleet, joined.device, joined.name, line.host, joined.port)
    credentials.keep(made.key, Certificates(joined.certificate, joined.probe_certificate, joined.authority))
    found.keep()
    return found


def _with_a_known_key(
    credentials: Credentials, request: Callable[[KeyAndRequest], Joined]
) -> tuple[KeyAndRequest, Joined]:
    """Return the key that was admitted, and the answer. Raises SettingError if the request is refused.

    A device that has joined before proves by a key that it may have its old id again. The coordinator knows
    its present key, or the one of a renewal whose answer was lost.
    """
    pending = credentials.pending()
    if credentials.key and pending is not None:
        with suppress(SettingError):
            return pending, request(pending)
    if credentials.key:
        made = key_and_request(credentials.key)  # not kept as pending: it would replace the other one
    else:
        made = pending or key_and_request()
        credentials.keep_pending(made)
    return made, request(made)


def _admitted(
    line: JoinLine, authority: str, request: JoinRequest, say: Say, sleep: Callable[[float], None]
) -> Joined:
    """Send the request until it is answered for good. Raises SettingError if it is refused."""
    said, is_known = set[str](), False

    def say_once(words: str) -> None:
        if words not in said:
            said.add(words)
            say(words)

    while True:
        try:
            answer, has_clock = _while_busy(lambda: send(line, authority, request), sleep)
        except TransportError as problem:
            if not is_known:
                raise
            say_once(str(problem))  # the coordinator may be starting again
            sleep(LONGEST_WAIT_S / 4)
            continue
        if not has_clock:
            say_once(CLOCK_BEHIND)
        match answer:
            case Joined():
                return answer
            case JoinRefused(reason):
                raise SettingError(readable(reason))
            case JoinPending(device, again_s):
                is_known = True
                say_once(
                    "waiting for approval: the fleet's operator lets this device in with"
                    f" `edge-coordinator approve {device}`"
                )
                sleep(min(max(again_s, FIRST_WAIT_S), LONGEST_WAIT_S))


def _while_busy(attempt: Callable[[], _T], sleep: Callable[[float], None]) -> _T:
    """Return the result of `attempt`; repeat it for a while if the server is busy."""
    for number in range(ATTEMPTS):
        try:
            return attempt()
        except ServerBusyError:
            sleep(FIRST_WAIT_S * 2**number)
    return attempt()
