"""Checks the way to the broker: name, connection, TLS, login, access rights, and a message there and back.

After a failed step all others are skipped. The checks connect as the client `<fleet>-<device>-probe`, so a
running agent stays connected.
"""

import ipaddress
import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from statistics import median

from fleetune.edge_agent.doctor import tls
from fleetune.edge_agent.doctor.check_result import Check, CheckResult, run_check
from fleetune.edge_agent.probes.channel_rights import ChannelRights, find_channel_rights
from fleetune.edge_agent.probes.link_speed import ProbeConnection
from fleetune.protocols.errors import RefusalReason, TransportError
from fleetune.protocols.wire import topics
from fleetune.protocols.wire.transport.mqtt import ENCODE, Broker

PATIENCE_S = 10.0
_NUM_PINGS = 5
_WRITES, _READS = ", ".join(topics.FROM_DEVICE), ", ".join(topics.TO_DEVICE)
_ECHO_BYTES = 4096
REMEDIES: dict[RefusalReason, str] = {
    "login": f"check user and password in mqtt://user:password@host, and the broker's list; {ENCODE}",
    "client-id": "the broker accepts only other client ids; allow <fleet>-<device> and"
    " <fleet>-<device>-probe",
    "protocol": "the broker must speak MQTT 3.1.1",
    "unavailable": "the broker is reachable but does not serve now; look at its log",
    "name-taken": "stop the other client of that name, or give this device a name of its own",
}


@dataclass(frozen=True)
class _Granted:
    """Positions of the subscriptions that the broker refused."""

    refused: tuple[int, ...]


class _Visit(ProbeConnection):
    """A connection that can also ask which subscriptions are granted."""

    def __init__(self, broker: Broker, fleet: str, device: str) -> None:
        client_id, topic = topics.probe(fleet, device, broker.username)
        super().__init__(broker, client_id, topic, time.monotonic, PATIENCE_S)
        self._client.on_subscribe = lambda _client, _data, _message, codes, _properties: self.events.put(
            _Granted(tuple(n for n, code in enumerate(codes) if code.is_failure))  # type: ignore[arg-type]
        )

    def refused(self, filters: list[str]) -> list[str]:
        """Subscribe, and return the topic filters that the broker refuses.

        Raises:
            TransportError: the broker does not answer.
        """
        self._client.subscribe([(one, 0) for one in filters])
        answer = self._wait(
            lambda event: isinstance(event, _Granted), PATIENCE_S, f"{self._broker} does not answer"
        )
        return [filters[n] for n in answer.refused]


def examine(broker: Broker, fleet: str | None, device: str) -> Iterator[CheckResult]:
    """Run one step after another, and skip the rest after a failure."""
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
        steps.append(("login", lambda: [CheckResult("skip", "login", "no --fleet given")]))
    else:
        steps.append(("login", partial(_logs_in, broker, fleet, device)))
    failed = False
    for what, check in steps:
        if failed:
            yield CheckResult("skip", what, "skipped because an earlier check failed")
            continue
        for result in run_check(what, check):
            failed |= result.verdict == "fail"
            yield result


def _resolves(broker: Broker) -> Iterator[CheckResult]:
    try:
        found = socket.getaddrinfo(broker.host, broker.port, type=socket.SOCK_STREAM)
    except OSError as problem:
        reason = f"{broker.host} is unknown ({problem.strerror})"
        yield CheckResult("fail", "broker's name", reason, "check the name, the network and its DNS server")
        return
    addresses = ", ".join(dict.fromkeys(str(one[4][0]) for one in found))
    yield CheckResult("ok", "broker's name", f"{broker.host} is {addresses}")


def _connects(broker: Broker) -> Iterator[CheckResult]:
    began, what = time.monotonic(), "connection"
    try:
        socket.create_connection((broker.host, broker.port), PATIENCE_S).close()
    except ConnectionRefusedError:
        remedy = "start the broker; check its port, and that it listens on more than its own loopback"
        yield CheckResult("fail", what, f"no program listens at {broker.place}", remedy)
    except TimeoutError:
        remedy = "check address, network and firewall"
        yield CheckResult("fail", what, f"no answer from {broker.place}", remedy)
    except OSError as problem:
        found = f"{broker.place}: {problem.strerror or problem}"
        yield CheckResult("fail", what, found, "check address, network and firewall")
    else:
        milliseconds = 1000 * (time.monotonic() - began)
        yield CheckResult("ok", what, f"{broker.place} answers within {milliseconds:.3g} ms")


def _without_tls(broker: Broker) -> Iterator[CheckResult]:
    if _is_loopback(broker.host):
        yield CheckResult("ok", "TLS", "none, and the broker is on this machine")
        return
    found = "none: everyone on the way can read and change all messages"
    if broker.password:
        found += ", the password too"
    yield CheckResult(
        "warn", "TLS", found, "give the broker a certificate and use mqtts:// (with --ca for your own)"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _logs_in(broker: Broker, fleet: str, device: str) -> Iterator[CheckResult]:
    """Log in, test the access rights, and send a message there and back."""
    what = "login"
    topics.check_name(fleet, "fleet")
    topics.check_name(device, "device")
    try:
        with closing(_Visit(broker, fleet, device)) as visit:
            visit.open()
            who = f"as {broker.username}" if broker.username else "without user name"
            yield CheckResult("ok", what, f"{broker} accepts the login, {who}")
            what = "subscriptions"
            # that user may subscribe only with the agent's own client id
            if broker.username != topics.JOIN_USER:
                yield _subscribed(visit, topics.device_subscriptions(fleet, device))
        what = "access rights"
        yield _access(find_channel_rights(broker, fleet, device))
        what = "round trip"
        with closing(_Visit(broker, fleet, device)) as visit:
            visit.open()
            yield _there_and_back(visit)
    except TransportError as problem:
        remedy = problem.remedy if problem.reason is None else REMEDIES[problem.reason]
        yield CheckResult("fail", what, problem.found, remedy or "look for the reason in the broker's log")


def _access(rights: ChannelRights) -> CheckResult:
    """Check if the device may write and read each of its channels."""
    what = "access rights"
    if rights.problem is not None:
        return CheckResult("fail", what, rights.problem, rights.remedy)
    if rights.has_coordinator:
        return CheckResult("ok", what, f"writes {_WRITES} and reads {_READS}: the coordinator answers")
    known = f"may write {_WRITES}; " if all(rights.acknowledged.values()) else ""
    found = f"{known}no coordinator of fleet {rights.fleet} answers; start it to test all access rights"
    return CheckResult("skip", what, found)


def _subscribed(visit: _Visit, filters: list[str]) -> CheckResult:
    refused = visit.refused(filters)
    if refused:
        remedy = "let this device's user read these topics (the broker's access rules)"
        return CheckResult("fail", "subscriptions", f"refused: {', '.join(refused)}", remedy)
    # mosquitto's acl_file grants every subscription and later drops forbidden messages
    return CheckResult("ok", "subscriptions", f"{', '.join(filters)} granted")


def _there_and_back(visit: _Visit) -> CheckResult:
    """Send a retained message and have it sent back.

    MQTT 3.1.1 does not report a forbidden publication: the message just never arrives.
    """
    there_s = median(visit.deliver(b".") for _ in range(_NUM_PINGS))
    visit.deliver(os.urandom(_ECHO_BYTES), retain=True)
    visit.fetch(_ECHO_BYTES, 1)
    return CheckResult("ok", "round trip", f"{1000 * there_s:.3g} ms; {_ECHO_BYTES} bytes came back whole")
