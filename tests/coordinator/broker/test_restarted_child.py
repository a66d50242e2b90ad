"""The broker of a run is restarted when it ends by itself, with back-off, on its port."""

import os
import signal
import socket
from contextlib import closing

import pytest
from tests.helpers.fleet_processes import wait_until
from tests.protocols.wire.test_transport import KINDS

from fleetune.coordinator.broker import restarted_child as module
from fleetune.coordinator.broker.embedded_broker import EmbeddedBroker
from fleetune.coordinator.broker.restarted_child import FIRST_PAUSE_S, LONGEST_PAUSE_S, RestartedChild
from fleetune.protocols.errors import TransportError


@pytest.fixture(params=KINDS)
def start(request, tmp_path):
    return lambda port: EmbeddedBroker.start(tmp_path, which=request.param, port=port)


def replaced(kept, broker):
    return lambda: kept.child is not broker and kept.child.running


def test_a_killed_broker_is_back_on_its_port(start, caplog):
    with closing(RestartedChild("embedded broker", start, 0)) as kept:
        for _ in range(2):
            first = kept.child
            os.kill(first.pid, signal.SIGKILL)
            wait_until(replaced(kept, first), "it is restarted")
            assert (kept.child.port, kept.child.which) == (first.port, first.which)
        last = kept.child
    assert not last.running
    assert "exit code -9; restarting it" in caplog.text


def test_a_port_that_was_taken_meanwhile_costs_one_line_and_it_goes_on_trying(start, caplog, monkeypatch):
    pauses, taken = [], []

    def pause(failures):
        """Take the port before the first restart; free it before the fifth."""
        pauses.append(failures)
        if len(pauses) == 1:
            taken.append(socket.create_server(("127.0.0.1", kept.child.port)))
        if len(pauses) == 5:
            taken.pop().close()
        return 0.0

    monkeypatch.setattr(module, "_pause_s", pause)
    with closing(RestartedChild("embedded broker", start, 0)) as kept:
        first = kept.child
        os.kill(first.pid, signal.SIGKILL)
        wait_until(replaced(kept, first), "it is restarted")
    assert pauses == [0, 1, 2, 3, 4]
    assert caplog.text.count("no broker can listen on") == 1
    assert "retrying" in caplog.text


def test_pauses_double_up_to_a_limit():
    pauses = [module._pause_s(failures) for failures in range(60)]
    for failures, pause_s in enumerate(pauses):
        longest_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**failures)
        assert longest_s / 2 <= pause_s <= longest_s
    assert len(set(pauses)) > 50, "each is drawn"


def test_closed_in_the_midst_of_a_pause_it_starts_no_other(start, monkeypatch):
    monkeypatch.setattr(module, "_pause_s", lambda _: 3600.0)
    kept = RestartedChild("embedded broker", start, 0)
    os.kill(kept.child.pid, signal.SIGKILL)
    wait_until(lambda: not kept.child.running, "it is dead")
    kept.close()
    assert not kept._thread.is_alive()


def test_a_first_broker_that_does_not_start_is_an_error(start):
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(TransportError, match="in use"):
        RestartedChild("embedded broker", start, server.getsockname()[1])


def test_ctrl_c_in_a_terminal_does_not_reach_the_broker(start):
    with closing(RestartedChild("embedded broker", start, 0)) as kept:
        assert os.getpgid(kept.child.pid) != os.getpgrp()
