"""Renewal of a device's certificates: when it asks, what it stores, and crashes at any moment."""

import queue
import ssl

import pytest
from tests.edge_agent.joining.test_joined_commands import joined
from tests.helpers.errors import raises
from tests.helpers.own_authority import OwnAuthority
from tests.helpers.power import ForgetfulDisk, PowerCut

import fleetune.protocols.wire.messages as wire
from fleetune.edge_agent.agent import Agent
from fleetune.edge_agent.joining.joined_fleet import Certificates
from fleetune.edge_agent.joining.signing_request import key_and_request
from fleetune.edge_agent.run.device import Device, DeviceSettings
from fleetune.edge_agent.run.renewal import AGAIN_S, Renewal
from fleetune.protocols.errors import StoreError
from fleetune.protocols.wire.transport import Received
from fleetune.protocols.wire.transport.memory import MemoryBroker

UP, DOWN = "fleetune/v1/homes/d-7/up", "fleetune/v1/homes/d-7/down"


def renewed(request, authority=None, device="d-7"):
    authority = authority or OwnAuthority()
    return wire.Renewed(*authority.for_request(request, device), authority.pem)


def works(credentials):
    """Check that both files of the device are a key with its certificate."""
    for path in (credentials.device, credentials.probe):
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(path)
    return True


@pytest.fixture
def renewal(tmp_path):
    events = queue.SimpleQueue()
    found = Renewal(joined(tmp_path).credentials, events.put)
    found.events = events
    return found


def asked(renewal, now=0.0):
    """The request of a renewal that the coordinator has asked for."""
    assert renewal.start(now) is None, "the key is made by a child process meanwhile"
    return renewal.note_made(renewal.events.get(timeout=60), now).content


def test_a_new_key_replaces_the_old_one_when_its_certificate_is_there(tmp_path, renewal):
    credentials = renewal._credentials
    before = credentials.key
    request = asked(renewal)
    assert credentials.key == before
    renewal.keep(renewed(request.signing_request))
    assert credentials.key not in ("", before)
    assert works(credentials)
    assert credentials.pending() is None
    assert renewal.wake_at is None


def test_a_request_without_an_answer_is_sent_again_as_it_was(renewal):
    request = asked(renewal)
    assert renewal.tick(AGAIN_S - 1) is None
    assert renewal.tick(AGAIN_S).content == request
    assert renewal.start(0.0).content == request
    again = Renewal(renewal._credentials, renewal._put)  # a restarted agent
    assert again.resume(0.0).content == request


def test_a_second_answer_and_a_foreign_certificate_change_nothing(renewal):
    credentials = renewal._credentials
    request = asked(renewal)
    with raises(StoreError, "do not belong"):
        renewal.keep(renewed(key_and_request().request))
    assert credentials.pending().request == request.signing_request
    answer = renewed(request.signing_request)
    renewal.keep(answer)
    key = credentials.key
    renewal.keep(renewed(request.signing_request))
    assert credentials.key == key


def test_a_device_that_joined_nothing_ignores_the_request():
    renewal = Renewal(None, None)
    assert renewal.start(0.0) is None
    assert renewal.resume(0.0) is None
    renewal.keep(wire.Renewed("", "", ""))


def test_a_power_cut_at_any_moment_leaves_a_key_with_its_certificate(tmp_path):
    authority, made = OwnAuthority(), key_and_request()
    steps = 0
    while True:
        state = tmp_path / str(steps)
        credentials = joined(state, "homes").credentials
        old = credentials.key
        disk = ForgetfulDisk(state, seed=steps)
        disk.cut_at = steps / 2
        with disk.in_place():
            try:
                credentials.keep_pending(made)
                credentials.keep(made.key, _certificates(authority, made))
                break
            except PowerCut:
                disk.cut()
        assert works(credentials)
        assert credentials.key in (old, made.key)
        assert credentials.key == made.key or credentials.pending() in (None, made)
        steps += 1
    assert steps > 40, "it was cut before and after each operation"


def _certificates(authority, made):
    return Certificates(*authority.for_request(made.request, "d-7"), authority.pem)


def test_an_agent_renews_over_its_connection(tmp_path):
    """The whole exchange with an agent that runs: asked, sent again, answered, stored."""
    home = joined(tmp_path)
    broker, seen = MemoryBroker(), queue.SimpleQueue()
    coordinator = broker.client([UP, "fleetune/v1/homes/d-7/state"], seen)
    coordinator.connect()
    settings = DeviceSettings("homes", "d-7", "digits", tmp_path / "homes" / "d-7")
    device = Device.opened(settings, credentials=home.credentials)
    agent = Agent(device, lambda farewell, events: broker.client([DOWN], events))
    agent._connection.connect()
    agent._handle(agent.events.get(timeout=5))
    coordinator.publish(DOWN, wire.encode(wire.RenewalDue()))
    agent._handle(agent.events.get(timeout=5))
    agent._handle(agent.events.get(timeout=60))
    request = _last(seen)
    assert isinstance(request, wire.Renew)
    agent._greet(0.0)  # a new connection
    assert _last(seen) == request
    coordinator.publish(DOWN, wire.encode(renewed(request.signing_request)))
    agent._handle(agent.events.get(timeout=5))
    assert home.credentials.pending() is None
    assert works(home.credentials)
    agent._jobs.close()
    device.close()


def _last(seen):
    """The last message of a device, among its presences."""
    found = None
    while not seen.empty():
        event = seen.get()
        if isinstance(event, Received) and event.topic == UP:
            found = wire.read_from_device(event.data)
    return found
