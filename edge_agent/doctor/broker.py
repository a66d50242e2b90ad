"""Checks the connection to the broker: name, port, TLS, login, access rights, and a test message.

After a failed step, all further steps are skipped. The checks connect as the client `<fleet>-<device>-probe`,
so a running agent stays connected.
"""

import ipaddress
import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from statistics import median

from fleetune.edge_agent.doctor import tls
from fleetune.edge_agent.doctor.check_result import Check, CheckResult, run_check
from fleetune.edge_agent.probes.channel_rights import ChannelRights, find_channel_rights
from fleetune.edge_agent.probes.link_speed import ProbeConnection
from fleetune.protocols.errors import RefusalReason, TransportError
from fleetune.protocols.wire import topics
from fleetune.protocols.wire.transport.mqtt import ENCODE, MOVED, Broker

PATIENCE_S = 10.0
_NUM_PINGS = 5
_WRITES, _READS = ", ".join(topics.FROM_DEVICE), ", ".join(topics.TO_DEVICE)
_ECHO_BYTES = 4096
REMEDIES: dict[RefusalReason, str] = {
    "login": f"check user and password in mqtt://user:password@host, and the broker's user list; {ENCODE}",
    "client-id": "let the broker accept the client ids <fleet>-<device> and <fleet>-<device>-probe",
    "protocol": "use a broker that speaks MQTT 3.1.1",
    "unavailable": "read the broker's log: it is reachable but accepts no clients now",
    "name-taken": "stop the other client of that name, or give this device a name of its own",
}


def examine(broker: Broker, fleet: str | None, device: str | None) -> Iterator[CheckResult]:
    """Run one step after another, and skip all further steps after a failure.

    Args:
        broker: address and credentials.
        fleet: name of the fleet. None: not given, so the login is skipped.
        device: id of the device; None if unknown, so the login is skipped.
    """
    steps: list[tuple[str, Check]] = [
        ("broker's name", partial(_resolves, broker)),
        ("connection", partial(_connects, broker)),
    ]
    if broker.tls:
        steps += [
            ("authority", partial(tls.authority, broker)),
            ("own certificate", partial(tls.own_certificate, broker)),
            ("broker's certificate", partial(tls.broker_certificate, broker)),
        ]
    else:
        steps.append(("TLS", partial(_without_tls, broker)))
    if fleet is None:
        steps.append(("login", lambda: [CheckResult("skip", "login", "--fleet is not given")]))
    elif device is None:
        unknown = "not checked, because the device's id is unknown (see state)"
        steps.append(("login", lambda: [CheckResult("skip", "login", unknown)]))
    else:
        steps.append(("login", partial(_logs_in, broker, fleet, device)))
    failed = False
    for what, check in steps:
        if failed:
            yield CheckResult("skip", what, "not checked, because an earlier check of the broker failed")
            continue
        for result in run_check(what, check):
            failed |= result.verdict == "fail"
            yield result


def _resolves(broker: Broker) -> Iterator[CheckResult]:
    try:
        known = socket.getaddrinfo(broker.host, broker.port, type=socket.SOCK_STREAM)
    except OSError as problem:
        found = f"{broker.host} has no known address ({problem.strerror})"
        remedy = "check the name, the network and its DNS server"
        yield CheckResult("fail", "broker's name", found, _or_moved(remedy, broker))
        return
    addresses = ", ".join(dict.fromkeys(str(one[4][0]) for one in known))
    yield CheckResult("ok", "broker's name", f"{broker.host} has the address {addresses}")


def _connects(broker: Broker) -> Iterator[CheckResult]:
    began, what = time.monotonic(), "connection"
    try:
        socket.create_connection((broker.host, broker.port), PATIENCE_S).close()
    except ConnectionRefusedError:
        remedy = "start the broker; check its port, and that it does not listen on its loopback only"
        yield CheckResult("fail", what, f"no program listens at {broker.place}", _or_moved(remedy, broker))
    except OSError as problem:  # TimeoutError is a subclass
        found = f"cannot connect to {broker.place}: {problem.strerror or problem}"
        yield CheckResult("fail", what, found, _or_moved("check address, network and firewall", broker))
    else:
        milliseconds = 1000 * (time.monotonic() - began)
        yield CheckResult("ok", what, f"{broker.place} answers within {milliseconds:.3g} ms")


def _or_moved(remedy: str, broker: Broker) -> str:
    """Return the remedy; with a joined fleet, also what to do if its coordinator has moved."""
    return f"{remedy}; {MOVED}" if broker.joined else remedy


def _without_tls(broker: Broker) -> Iterator[CheckResult]:
    if _is_loopback(broker.host):
        yield CheckResult("ok", "TLS", "not used; the broker is on this machine")
        return
    found = "not used: others in the network can read and change all messages"
    if broker.password:
        found += ", and read the password"
    remedy = "give the broker a certificate and use mqtts:// (with --ca for an authority of your own)"
    yield CheckResult("warn", "TLS", found, remedy)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _logs_in(broker: Broker, fleet: str, device: str) -> Iterator[CheckResult]:
    """Log in, test the access rights, and have a message sent back."""
    what = "login"
    topics.check_name(fleet, "fleet")
    topics.check_name(device, "device")
    try:
        with closing(_connection(broker, fleet, device)) as connection:
            connection.open()
            user = broker.username or (device if broker.joined else None)
            who = f"as {user}" if user else "without user name"
            yield CheckResult("ok", what, f"{broker} accepts the login, {who}")
        what = "access rights"
        yield _access(find_channel_rights(broker, fleet, device))
        what = "round trip"
        with closing(_connection(broker, fleet, device)) as connection:
            connection.open()
            yield _round_trip(connection)
    except TransportError as problem:
        remedy = problem.remedy if problem.reason is None else REMEDIES[problem.reason]
        yield CheckResult("fail", what, problem.found, remedy or "look for the reason in the broker's log")


def _connection(broker: Broker, fleet: str, device: str) -> ProbeConnection:
    client_id, topic = topics.probe(fleet, device, joined=broker.joined)
    return ProbeConnection(broker.second, client_id, topic, time.monotonic, PATIENCE_S)


def _access(rights: ChannelRights) -> CheckResult:
    """Check if the device may write and read each of its channels."""
    what = "access rights"
    if rights.problem is not None:
        return CheckResult("fail", what, rights.problem, rights.remedy)
    if rights.has_coordinator:
        return CheckResult("ok", what, f"the device may write {_WRITES} and read {_READS}")
    known = f"the device may write {_WRITES}; " if all(rights.acknowledged.values()) else ""
    found = f"{known}no coordinator of fleet {rights.fleet} answers; start one to test all access rights"
    return CheckResult("skip", what, found)


def _round_trip(connection: ProbeConnection) -> CheckResult:
    """Measure the time of small messages, then send a retained message and have the broker send it back."""
    trip_s = median(connection.deliver(b".") for _ in range(_NUM_PINGS))
    connection.deliver(os.urandom(_ECHO_BYTES), retain=True)
    connection.fetch(_ECHO_BYTES, 1)
    found = f"{1000 * trip_s:.3g} ms; a message of {_ECHO_BYTES} bytes came back complete"
    return CheckResult("ok", "round trip", found)
