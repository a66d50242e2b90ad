"""When a coordinator asks devices to renew, and how it bounds their requests."""

from collections import Counter
from types import SimpleNamespace

import pytest
from tests.helpers.errors import raises

import fleetune.protocols.wire.messages as wire
from fleetune.coordinator.broker.known_devices import KnownDevices
from fleetune.coordinator.serving.renewals import (
    ASK_EVERY_S,
    LOOK_EVERY_S,
    MOST_AT_ONCE,
    Renewals,
    RenewalsSigned,
)
from fleetune.protocols.errors import PacketCorrupt, PacketForeign, StoreError
from fleetune.protocols.wire.capabilities import EVERYTHING, Capabilities
from fleetune.protocols.wire.identity import Identity

ANSWER = wire.Renewed("c", "p", "a")


class Fleet(KnownDevices):
    """Devices with certificates; `due` are to be renewed."""

    def __init__(self):
        super().__init__()
        self.due, self.batches, self.problem = set(), [], None

    def is_renewal_due(self, device):
        return device in self.due

    def renew(self, requests):
        self.batches.append(dict(requests))
        if self.problem is not None:
            raise self.problem
        return dict.fromkeys(requests, ANSWER)


@pytest.fixture
def world(monkeypatch):
    """Renewals whose thread does its work at once."""
    found = SimpleNamespace(fleet=Fleet(), sent=[], rejected=[], events=[], sessions={})

    class AtOnce:
        def __init__(self, target, args, **_):
            self.start = lambda: target(*args)

    monkeypatch.setattr("fleetune.coordinator.serving.renewals.threading.Thread", AtOnce)
    transfers = SimpleNamespace(
        publish=lambda session, packet: found.sent.append((session.device, packet.content))
    )
    rejected = SimpleNamespace(note=lambda problem, device: found.rejected.append((device, str(problem))))
    found.renewals = Renewals(found.fleet, found.sessions, transfers, rejected, found.events.append)
    return found


def session(world, device="pi", *, known_by="certificate", reads=EVERYTHING, online=True):
    found = SimpleNamespace(
        device=device, identity=Identity(device, device, known_by), reads=reads, online=online
    )
    world.sessions[device] = found
    return found


def test_connected_devices_that_are_due_and_can_renew_are_asked_once_an_hour(world):
    for name, how in {
        "pi": {},
        "older": {"reads": Capabilities(3)},
        "away": {"online": False},
        "fresh": {},
    }.items():
        session(world, name, **how)
    world.fleet.due = {"pi", "older", "away"}
    for now in range(0, int(ASK_EVERY_S + 3 * LOOK_EVERY_S), int(LOOK_EVERY_S) // 2):
        world.renewals.look(float(now))
    assert Counter(world.sent) == {("pi", wire.RenewalDue()): 2}


def test_a_request_is_signed_elsewhere_and_answered(world):
    world.renewals.take(session(world), wire.Renew("request"), 0.0)
    assert world.fleet.batches == [{"pi": "request"}]
    assert world.sent == []
    world.renewals.note_signed(world.events.pop())
    assert world.sent == [("pi", ANSWER)]


def test_a_device_without_a_certificate_gets_none(world):
    for known_by in ("claim", "login", "secret"):
        with raises(PacketForeign, "no certificate of this fleet"):
            world.renewals.take(session(world, known_by=known_by), wire.Renew("request"), 0.0)
    assert world.fleet.batches == []


def test_requests_of_one_device_are_limited(world):
    pi = session(world)
    for second in range(100):
        world.renewals.take(pi, wire.Renew("request"), float(second))
        while world.events:
            world.renewals.note_signed(world.events.pop())
    assert len(world.fleet.batches) == 4, "three at once, and one a minute"


def test_requests_that_wait_are_signed_together(world):
    for number in range(3 * MOST_AT_ONCE):
        world.renewals.take(session(world, f"d{number}"), wire.Renew("r"), 0.0)
    while world.events:
        world.renewals.note_signed(world.events.pop())
    assert [len(batch) for batch in world.fleet.batches] == [1, 100, 100, 99]
    assert len(world.sent) == 3 * MOST_AT_ONCE


def test_a_failure_and_a_refusal_are_logged_and_nothing_stops(world, caplog):
    world.fleet.problem = StoreError("the disk is full")
    world.renewals.take(session(world), wire.Renew("request"), 0.0)
    world.renewals.note_signed(world.events.pop())
    assert "the disk is full; the devices ask again" in caplog.text
    world.renewals.note_signed(RenewalsSigned({"pi": PacketCorrupt("no request")}))
    assert world.rejected == [("pi", "no request")]
    world.fleet.problem = None
    world.renewals.take(session(world), wire.Renew("request"), 1.0)
    world.renewals.note_signed(world.events.pop())
    assert world.sent == [("pi", ANSWER)]
