"""Devices that may no longer connect leave the open round at once, and may come back later."""

from contextlib import closing

import pytest
from tests.helpers.talk import Coordinating, answered, run_settings

from fleetune.coordinator.broker.known_devices import DevicesChanged
from fleetune.coordinator.queries.waiting import waiting_reason
from fleetune.protocols.wire.messages import TransferKey

SETTINGS = run_settings(start_with=2, rounds=9)


@pytest.fixture
def talk(tmp_path):
    """A run of two devices, whose round 1 is open; the folder is `tmp_path`."""
    with closing(Coordinating.of(tmp_path, SETTINGS)) as talk:
        for device in "ab":
            talk.greet(device, num_samples=10)
        yield talk


def words(talk):
    return waiting_reason(talk.run.controller.engine_state, SETTINGS.round)


def reply(talk, device, number):
    update = answered(talk.session(device), talk.task(device))
    assert talk.send(device, TransferKey("update", talk.id, number, 1), update).refused is None


@pytest.mark.parametrize("why", ["revoked", "forgotten", "must join again"])
def test_a_round_does_not_wait_for_a_device_that_is_shut_out(talk, why):
    assert words(talk).startswith("round 1 waits for a (working), b (working)")
    reply(talk, "b", 1)
    talk.server._handle(DevicesChanged({"a": why, "stranger": "revoked"}))
    assert talk.run.controller.round_attempt == (2, 1), "it closed with the reply of b"
    assert talk.run.controller.engine_state.members["a"].refusal == why
    talk.server._handle(DevicesChanged({"a": why}))
    assert talk.run.controller.engine_state.counters["refused"] == 1


def test_a_device_that_was_revoked_while_no_coordinator_ran_is_not_waited_for(talk, tmp_path):
    talk.close()
    with closing(Coordinating.of(tmp_path, SETTINGS)) as again:
        again.server._handle(DevicesChanged({"a": "revoked"}))
        again.greet("b", num_samples=10)
        reply(again, "b", 1)
        assert again.run.controller.round_attempt == (2, 1)


def test_a_device_that_is_approved_again_takes_part(talk):
    talk.server._handle(DevicesChanged({"a": "revoked"}))
    reply(talk, "b", 1)
    talk.server._handle(DevicesChanged({}))
    talk.greet("a", num_samples=10)
    reply(talk, "b", 2)
    assert words(talk).startswith("round 3 waits for a (working), b (working)")
